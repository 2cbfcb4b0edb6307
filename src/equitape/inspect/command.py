"""What `equitape inspect` does, from its settings to the files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..pretrained.loading import load_model, load_tokenizer_of
from ..report.inspection import write_page
from ..report.inspection_plots import write_plots
from ..report.inspection_text import print_layers, print_stability
from .inspection import inspect_model
from .load import Text, begin_token_of, read_numbers, read_text
from .stability import measure_stability

PAGE, NUMBERS = "inspect.html", "inspect.json"


@dataclass(frozen=True, kw_only=True)
class InspectSettings:
    """The options of the command."""

    model: str
    text: str | None = None
    ids: str | None = None
    out: Path = Path("inspect")
    tokenizer: str | None = None
    base: str | None = None
    max_tokens: int = 512
    show: str | None = None
    cells: int = 128
    stability: bool = True
    also: tuple[str, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if (self.text is None) == (self.ids is None):
            given = "neither is given" if self.text is None else "both are given"
            raise ValueError(f"Give what the model reads, by --text or by --ids; {given}.")
        for entry in self.also:
            if not all(entry.partition("=")):
                raise ValueError(f"--also is {entry!r}; it must be NAME=FOLDER.")
        standing = next(path for path in (self.out, *self.out.parents) if path.exists())
        if not standing.is_dir():
            raise ValueError(f"--out is {str(self.out)!r}, and {str(standing)!r} is a file; give a folder.")
        self.window()

    def window(self) -> tuple[int, int] | None:
        """--show as numbers."""
        if self.show is None:
            return None
        first, _, end = self.show.partition(":")
        if not (first.isdigit() and end.isdigit()):
            raise ValueError(f"--show is {self.show!r}; it must be FIRST:END, as 0:128.")
        return int(first), int(end)


def run(settings: InspectSettings, console: Console) -> None:
    """Load, look, write, and say what was found."""
    model = load_model(settings.model, settings.dtype, settings.base)
    text = find_text(settings, model)
    also = {}
    for entry in settings.also if settings.stability else ():
        name, _, folder = entry.partition("=")
        also[name] = load_model(folder, settings.dtype)
    inspection = inspect_model(model, text.input_ids, text.labels, show=settings.window(), max_cells=settings.cells)
    stability = measure_stability(model, text.input_ids, text.begin_token, also) if settings.stability else None
    name = Path(settings.model).name or settings.model
    notes = [text.note] * bool(text.note) + inspection.notes()
    facts = facts_of(settings, model, text)
    write_page(
        settings.out / PAGE,
        inspection,
        title=f"Inside {name}",
        facts=facts,
        stability=stability,
    )
    numbers = {
        "facts": dict(facts),
        "notes": notes,
        "by_layer": inspection.by_layer(),
        "stability": None if stability is None else asdict(stability),
    }
    (settings.out / NUMBERS).write_text(json.dumps(numbers, indent=2), encoding="utf-8")
    pictures = write_plots(inspection, settings.out)
    print_layers(inspection, console)
    if stability is not None:
        print_stability(stability, console)
    if text.total > inspection.num_tokens:
        console.print(
            f"The text has {text.total} tokens; the first {inspection.num_tokens} were read.", highlight=False
        )
    for note in notes:
        console.print(escape(note), highlight=False)
    names = ", ".join(path.name for path in pictures)
    console.print(f"Written to {settings.out}: {PAGE}, {NUMBERS}, {names}.", highlight=False, soft_wrap=True)


def find_text(settings: InspectSettings, model: Any) -> Text:
    """The tokens to read, by the model's own tokenizer or the one asked for."""
    config = model.config
    if settings.ids is not None:
        begin = begin_token_of(config, None)
        return read_numbers(settings.ids, config.vocab_size, settings.max_tokens, begin)
    assert settings.text is not None
    try:
        tokenizer = load_tokenizer_of(settings.model, settings.base, settings.tokenizer)
    except ValueError as error:
        if settings.tokenizer is not None:
            raise
        hint = "A model without one, as of a synthetic task, reads token ids: --ids '3 1 4'."
        raise ValueError(f"{error} {hint}") from None
    begin = begin_token_of(config, tokenizer)
    return read_text(settings.text, tokenizer, config.vocab_size, settings.max_tokens, begin)


def facts_of(settings: InspectSettings, model: Any, text: Text) -> list[tuple[str, str]]:
    """What the page tells of how it was made."""
    from ..runs.environment import describe_environment

    found = {
        "encoding": ", ".join(f"{key}={value}" for key, value in model.config.encoding.items()),
        "dtype": settings.dtype,
        "text": text.note or None,
        "tokens read": f"{text.input_ids.shape[1]} of {text.total}",
        "[BOS] of the table of stability": f"token {text.begin_token}",
        **describe_environment(),
    }
    return [(key, str(value)) for key, value in found.items() if value is not None]
