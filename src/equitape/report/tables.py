"""Tables as cells, and their rendering in Markdown and LaTeX (templates render HTML)."""

from dataclasses import dataclass, field

LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$",
    "…": r"\dots{}", "★": r"$\star$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A text, with a smaller detail below it."""

    text: str
    detail: str = ""
    kind: str = ""
    """Style: "best", "clear", "failed", "words" or plain."""


def cells(*texts: str) -> list[Cell]:
    """Plain cells."""
    return [Cell(text=text) for text in texts]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows; the first cell of a row is its name."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)

    def has_words(self, column: int) -> bool:
        """Whether a column has sentences, which begin on the left."""
        return any(cell.kind == "words" for row in self.rows for cell in row[column : column + 1])


def markdown_table(table: Table) -> str:
    """A Markdown table, details in brackets."""

    def text(cell: Cell) -> str:
        star = " ★" if cell.kind == "best" else ""
        detail = f" ({cell.detail})" if cell.detail else ""
        shown = f"**{cell.text}**" if cell.kind == "clear" else cell.text
        return f"{shown}{star}{detail}".replace("|", "\\|").replace("\n", " ")

    sides = ["---" if table.has_words(column) else "---:" for column in range(1, len(table.columns))]
    lines = [table.columns, ["---", *sides]]
    lines += [[text(cell) for cell in row] for row in table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def latex_table(table: Table, details: bool = False) -> str:
    """A LaTeX table with booktabs; best figures are bold, notes follow the caption.

    details: include the detail of every cell in brackets.
    """

    def text(cell: Cell) -> str:
        shown = escape_latex(cell.text)
        shown = rf"\textbf{{{shown}}}" if cell.kind in ("best", "clear") else shown
        return shown + (f" ({escape_latex(cell.detail)})" if details and cell.detail else "")

    body = [" & ".join(text(cell) for cell in row) + r" \\" for row in table.rows]
    caption = escape_latex(" ".join([table.title + ".", *table.notes]))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"\toprule",
            " & ".join(escape_latex(column) for column in table.columns) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{caption}}}",
            r"\end{table}",
        ]
    )


def latex_document(tables: list[str]) -> str:
    """The tables of a file, with the package they need."""
    return "\n\n".join(["% needs \\usepackage{booktabs}", *tables]) + "\n"


def escape_latex(text: str) -> str:
    """Escape LaTeX's special characters."""
    return "".join(LATEX_ESCAPES.get(letter, letter) for letter in text)
