"""The report of an extension: a page, the same in Markdown, plots before and after, and a part of the model card."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from ..registry import counted
from ..runs.extension import EXTENDED, ORIGINAL, RETRIEVAL, Extension, perplexities, scores
from ..runs.results import ARROWS, EvaluationReport
from .evaluation_plots import plot_curves, plot_grids
from .numbers import duration, number
from .pages import MARKDOWN, write_pages
from .style import Plot
from .tables import Cell, Table, cells, markdown_table

PROMPT = "The story so far:"
TITLE, FIGURES = "\n# ", "## Before and after"
"""How the title of a card and the part with the figures begin."""
MARGIN, POINTS = 1.01, 5.0
"""A comparator is better if a perplexity is lower by this factor, or a mean score higher by so many points."""


def write_extension(extension: Extension, out: Path) -> None:
    """Write report.html (self-contained), report.md and the plots into `out`."""
    content = {
        "title": f"{extension.base}: {extension.context:,} to {extension.to:,} tokens",
        "verdict": extension.verdict,
        "better": better_columns(extension),
        "command": try_command(extension) if is_trained(extension) else None,
        "tables": [figures_table(extension), damage_table(extension), plan_table(extension), checks_table(extension)],
        "notes": notes_of(extension),
        "facts": facts_of(extension),
    }
    write_pages("extension", out, content, extension_plots(extension))


def extension_card(extension: Extension, card: str, inside: str = "") -> str:
    """A model card: the verdict below its title, and at its end the figures and a command to try the model.

    card: without these, or with older ones, which are replaced. inside: the folder of the whole model inside that of
    the extension, for its card.
    """
    pages = f"../{MARKDOWN}" if inside else MARKDOWN
    card, older, _ = card.partition(f"\n{FIGURES}\n")
    start = card.index(TITLE) + 1
    title, rest = card[start:].split("\n", 1)
    if older:
        # the verdict
        rest = rest.strip().partition("\n\n")[2]
    parts = [
        f"{card[:start]}{title}",
        extension.verdict.sentence,
        rest.strip(),
        FIGURES,
        *better_columns(extension),
        markdown_table(figures_table(extension)),
        "At short lengths:",
        markdown_table(damage_table(extension)),
        "## Try it",
        f"```sh\n{try_command(extension, inside)}\n```",
        f"Plots and protocols: [{MARKDOWN}]({pages}).",
    ]
    return "\n\n".join(parts) + "\n"


def has_title(card: str) -> bool:
    """Whether this is a model card, as far as `extension_card` needs it."""
    return TITLE in card


def try_command(extension: Extension, inside: str = "") -> str:
    """One line to chat with the extended model, or to let it continue a text. inside: as in `extension_card`."""
    folder = str(Path(extension.folder, inside))
    words = ["equitape", "chat", folder] if extension.chats else ["equitape", "generate", folder, PROMPT]
    if not inside:
        words += ["--base", extension.base_path]
        if extension.settings.get("tokenizer"):
            words += ["--tokenizer", str(extension.settings["tokenizer"])]
    return shlex.join(words)


def is_trained(extension: Extension) -> bool:
    """Whether there is an extended model."""
    return bool(extension.training["status"] == "done")


def better_columns(extension: Extension) -> list[str]:
    """A sentence that names the comparators that clearly beat the extended model somewhere, and lost nowhere."""
    found = {model: headlines(extension, model) for model in extension.reports}
    own = found.pop(EXTENDED, {})
    better = [
        model
        for model, figures in found.items()
        if model != ORIGINAL
        and figures.keys() == own.keys()
        and all(figures[name].value <= own[name].value for name in own)
        and any(figures[name].value < own[name].clearly_below for name in own)
    ]
    return (
        [f"Better than the extended model in some figures, and worse in none: {', '.join(better)}."] if better else []
    )


@dataclass(frozen=True)
class Headline:
    """A figure of which less is better: a perplexity, or what is not found, in per cent."""

    value: float
    clearly_below: float
    """What other models must stay below to be better by more than chance often is."""


def headlines(extension: Extension, model: str) -> dict[str, Headline]:
    """Up to the new context: perplexity at short lengths and at the longest, and what is found."""
    reports = extension.reports[model]
    figures: dict[str, Headline] = {}
    if "perplexity" in reports:
        for text, values in perplexities(reports["perplexity"]).items():
            known = {length: value for length, value in values.items() if length <= extension.to and value is not None}
            for length in {*extension.short, max(known, default=0)} & known.keys():
                figures[f"{text} at {length}"] = Headline(known[length], known[length] / MARGIN)
    for task in RETRIEVAL:
        by_length = scores(reports[task]) if task in reports else {}
        found = [value for length, value in by_length.items() if length <= extension.to]
        if found:
            missed = 100 - sum(value or 0.0 for value in found) / len(found)
            figures[task] = Headline(missed, missed - POINTS)
    return figures


def of_task(extension: Extension, task: str) -> dict[str, EvaluationReport]:
    """The reports of one task by model."""
    return {model: tasks[task] for model, tasks in extension.reports.items() if task in tasks}


def figures_table(extension: Extension) -> Table:
    """Perplexity, passkey and needles by length, one column per model."""
    models = list(extension.reports)
    rows = []
    found = of_task(extension, "perplexity")
    tables = {model: perplexities(report) for model, report in found.items()}
    for text, lengths in tables.get(ORIGINAL, {}).items():
        for length in lengths:
            values = [number(tables[model].get(text, {}).get(length)) for model in models]
            rows.append(cells(f"perplexity of {text} at {length:,} ↓", *values))
    for task, name in RETRIEVAL.items():
        by_model = {model: scores(report) for model, report in of_task(extension, task).items()}
        for length in by_model.get(ORIGINAL, {}):
            values = [number(by_model.get(model, {}).get(length), 1) for model in models]
            rows.append(cells(f"{name} at {length:,}, % ↑", *values))
    context = f"The original reads {extension.context:,} tokens; longer rows are beyond what it was made for."
    return Table(title="Before and after", columns=["", *models], rows=rows, notes=[context])


def damage_table(extension: Extension) -> Table:
    """What the longer context cost at short lengths."""
    others = [model for model in extension.reports if model != ORIGINAL]
    tables = {model: perplexities(report) for model, report in of_task(extension, "perplexity").items()}
    rows = []
    for text, values in tables.get(ORIGINAL, {}).items():
        for length in extension.short:
            was = values.get(length)
            found = []
            for model in others:
                now = tables.get(model, {}).get(text, {}).get(length)
                times = "-" if now is None or not was else f"{now / was:.3f} times"
                found.append(f"{number(now)} ({times})")
            rows.append(cells(f"perplexity of {text} at {length:,} ↓", number(was), *found))
    known = [extension.agreements.get(model) for model in others]
    first = next((each for each in known if each is not None), None)
    notes = []
    if first is not None:
        rows.append(cells("next-token agreement, % ↑", "100", *(number(a.agreement if a else None, 2) for a in known)))
        rows.append(cells("KL from the original, nats per token ↓", "0", *(number(a.kl if a else None) for a in known)))
        notes = [f"Agreement and KL are of {first.tokens:,} predictions in windows of {first.length:,} tokens."]
    rows += harness_rows(extension, [ORIGINAL, *others])
    return Table(title="Damage at short lengths", columns=["", ORIGINAL, *others], rows=rows, notes=notes)


def harness_rows(extension: Extension, models: list[str]) -> list[list[Cell]]:
    """The metrics of the task of lm-evaluation-harness, on its own scale."""
    found = of_task(extension, "lm-eval")
    if ORIGINAL not in found:
        return []
    report = found[ORIGINAL]
    names = [name for name in report.metrics if name != report.headline and "stderr" not in name]
    values = {model: found[model].metrics if model in found else {} for model in models}
    arrows = {name: ARROWS[report.metric(name).higher_is_better] for name in names}
    return [
        cells(f"lm-eval, {name}{arrows[name]}", *(number(values[model].get(name)) for model in models))
        for name in names
    ]


def plan_table(extension: Extension) -> Table:
    """What was chosen and why."""
    rows = [
        [Cell(text=choice["name"]), *(Cell(text=choice[part], kind="words") for part in ("value", "reason"))]
        for choice in extension.plan
    ]
    return Table(title="The plan", columns=["", "choice", "reason"], rows=rows)


def checks_table(extension: Extension) -> Table:
    """Every condition of a success."""
    rows = [
        [
            Cell(text=check.name),
            Cell(text="passed" if check.passed else "failed", kind="" if check.passed else "failed"),
            Cell(text=check.sentence, kind="words"),
        ]
        for check in extension.verdict.checks
    ]
    return Table(title="Checks of the verdict", columns=["", "", "what was found"], rows=rows)


def extension_plots(extension: Extension) -> list[Plot]:
    """Perplexity by length, and heat maps of passkey and needles by length and depth, all models in each."""
    plots = []
    found = of_task(extension, "perplexity")
    if ORIGINAL in found:
        curves = found[ORIGINAL].curves
        plots += [plot_curves(found, curve.title) for curve in curves if " against length" in curve.title]
    for task in RETRIEVAL:
        found = of_task(extension, task)
        if ORIGINAL in found:
            plots += [plot_grids(found, grid.title) for grid in found[ORIGINAL].grids if grid.row_label == "depth"]
    return plots


def notes_of(extension: Extension) -> list[str]:
    """What was left out, and the notes of the evaluations, each once."""
    reports = [report for tasks in extension.reports.values() for report in tasks.values()]
    return list(dict.fromkeys([*extension.notes, *(note for report in reports for note in report.notes)]))


def facts_of(extension: Extension) -> list[tuple[str, str]]:
    """Training, settings and environment as pairs."""
    run = extension.training.get("run", {})
    trained = {
        "trained for": f"{counted(run['steps'], 'step')}, {run['tokens']:,} tokens, {duration(run['seconds'])}"
        if run
        else None,
        "peak MiB of training": None if run.get("peak_mib") is None else f"{run['peak_mib']:,.0f}",
    }
    protocol = {
        f"protocol of {task}": " ".join(report.protocol)
        for task, report in extension.reports.get(EXTENDED, extension.reports[ORIGINAL]).items()
    }
    settings = {f"setting {key}": value for key, value in extension.settings.items()}
    facts = {**trained, **protocol, **settings, **extension.environment}
    return [(str(key), str(value)) for key, value in facts.items() if value is not None]
