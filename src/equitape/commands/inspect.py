"""equitape inspect."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..runs.files import check_writable, read_json
from ..settings import Ge, Settings
from .options import OptionsOf, takes_settings

PAGE, NUMBERS = "inspect.html", "inspect.json"


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Settings):
    """Options of the command."""

    text: str | None = None
    """Input text: a file, or the text itself if no such file exists."""
    ids: str | None = None
    """Token ids instead of text: a file, or numbers such as '3 1 4'."""
    out: Path = Path("inspect")
    """Folder for the page, JSON figures and PNG files."""
    overwrite: bool = False
    """Replace an earlier inspection in --out."""
    tokenizer: str | None = None
    """'bytes', or a folder. Default: the model's own."""
    base: str | None = None
    """The pretrained model under an adapter."""
    max_tokens: Annotated[int, Ge(2)] = 512
    """Read at most this many tokens of the text."""
    show: str | None = None
    """Show only tokens FIRST:END, without pooling."""
    cells: Annotated[int, Ge(2)] = 128
    """Maximum rows of a map; more tokens are pooled, with a note."""
    stability: bool = True
    """Also measure stability under shifts (Table 8)."""
    also: dict[str, str] = field(default_factory=dict)
    """NAME=FOLDER of another model for the stability table."""
    dtype: str = "float32"
    """float32, float64 or bfloat16."""

    def __post_init__(self) -> None:
        check_writable(self.out)
        if not self.overwrite and any((self.out / name).exists() for name in (PAGE, NUMBERS)):
            raise ValueError(
                f"{str(self.out)!r} holds an earlier inspection; choose another folder for --out, or add --overwrite."
            )
        self.window()

    def earlier_files(self) -> set[str]:
        """Names of the files of an earlier inspection in the folder."""
        earlier = read_json(self.out / NUMBERS)
        files = earlier.get("files") if isinstance(earlier, dict) else None
        # never a path out of the folder
        return {Path(str(name)).name for name in files} if isinstance(files, list) else set()

    def check_input(self, is_module: bool) -> None:
        """Require one input for a model, none for a module, which draws its own."""
        if is_module:
            given = [name for name in ("text", "ids", "tokenizer", "base", "also") if getattr(self, name)]
            if given:
                raise ValueError(f"--{given[0]} is for models of text; a module draws its own input.")
        elif (self.text is None) == (self.ids is None):
            number = "neither is given" if self.text is None else "both are given"
            raise ValueError(f"Give the input with either --text or --ids; {number}.")

    def window(self) -> tuple[int, int] | None:
        """--show as numbers."""
        if self.show is None:
            return None
        first, _, end = self.show.partition(":")
        if not (first.isdigit() and end.isdigit()):
            raise ValueError(f"--show is {self.show!r}; it must be FIRST:END, for example 0:128.")
        return int(first), int(end)


@takes_settings
def inspect(
    model: Annotated[str, typer.Argument(help="Folder of a model, run or adapter, or FILE.py:NAME of a module.")],
    given: Annotated[dict[str, Any], OptionsOf(cls=InspectOptions)],
) -> None:
    """Show attention, positional states, distances and mixing while a model reads a text.

    Writes a self-contained HTML page with sliders for layer and head, PNG files, and the figures as JSON. A module
    built from equitape.nn is given as FILE.py:NAME and draws its own input.
    """
    from ..inspect.inspection import inspect_model
    from ..inspect.load import find_text, load_module, names_module
    from ..inspect.stability import measure_stability
    from ..pretrained.loading import load_model
    from ..report.inspection import write_page
    from ..report.inspection_plots import inspection_plots
    from ..report.inspection_text import print_layers, print_stability
    from ..report.pages import write_plots
    from ..runs.environment import describe_environment
    from ..runs.files import write_json
    from ..runs.progress import Progress

    options = InspectOptions.parse(given, "inspect")
    options.check_input(names_module(model))
    console = Console()
    progress = Progress(console)
    stability, cut = None, ""
    notes: list[str] = []
    facts: dict[str, str | None]
    if names_module(model):
        import torch

        with progress.phase("loading the module"):
            module = load_module(model, options.dtype)
        inputs, ids = module.sample(options.max_tokens, torch.Generator().manual_seed(0))
        with progress.phase("recording attention and states"):
            inspection = inspect_model(
                module, inputs[:1], position_ids=ids, show=options.window(), max_cells=options.cells
            )
        facts = {"input": f"drawn by the module: {len(ids)} tokens"}
    else:
        with progress.phase("loading the model"):
            loaded = load_model(model, options.dtype, options.base)
        text = find_text(
            loaded.config, model, options.base, options.tokenizer, options.text, options.ids, options.max_tokens
        )
        others = {}
        for name, folder in (options.also if options.stability else {}).items():
            with progress.phase(f"loading {name}"):
                others[name] = load_model(folder, options.dtype)
        with progress.phase("recording attention and states"):
            inspection = inspect_model(
                loaded, text.input_ids, text.labels, show=options.window(), max_cells=options.cells
            )
        if options.stability:
            with progress.phase("measuring stability"):
                stability = measure_stability(loaded, text.input_ids, text.begin_token, others)
        notes = [text.note] * bool(text.note)
        if text.total > inspection.num_tokens:
            cut = f"The text has {text.total} tokens; only the first {inspection.num_tokens} were read."
        facts = {
            "text": text.note or None,
            "tokens read": f"{text.input_ids.shape[1]} of {text.total}",
            "[BOS] of the stability table": f"token {text.begin_token}",
        }
    notes += inspection.notes()
    encoding = ", ".join(f"{key}={value}" for key, value in inspection.encoding.items())
    described = {"encoding": encoding, "dtype": options.dtype, **facts, **describe_environment()}
    known = {key: value for key, value in described.items() if value is not None}
    title = f"Inside {Path(model).name or model}"
    with progress.phase("writing the page"):
        earlier = options.earlier_files()
        write_page(options.out / PAGE, inspection, title=title, facts=list(known.items()), stability=stability)
        files = [PAGE, NUMBERS, *write_plots(inspection_plots(inspection), options.out)]
        measured = None if stability is None else asdict(stability)
        numbers = {"facts": known, "notes": notes, "by_layer": inspection.by_layer(), "stability": measured}
        write_json(options.out / NUMBERS, {**numbers, "files": files})
        # pictures of views that this model does not have
        for name in earlier - set(files):
            (options.out / name).unlink(missing_ok=True)
    print_layers(inspection, console)
    if stability is not None:
        print_stability(stability, console)
    if cut:
        notes.insert(0, cut)
    for note in notes:
        console.print(escape(note), highlight=False)
    console.print(f"Written to {options.out}: {', '.join(files)}.", highlight=False, markup=False, soft_wrap=True)
