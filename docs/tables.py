"""Rewrite the tables in docs/how-to/training.md and docs/explanation/scale.md from the code: python docs/tables.py."""

from pathlib import Path

from equitape.report.scale import plan_cells
from equitape.scale import plan
from equitape.training.recipe import Recipe, available_recipes, list_fields, load_recipe

PAGE = Path(__file__).parent / "how-to/training.md"
SCALE = Path(__file__).parent / "explanation/scale.md"
PLANS = {
    ("7b", 131072): 8,
    ("7b", 1 << 20): 32,
    ("70b", 131072): 64,
    ("70b", 1 << 20): 256,
    ("405b", 131072): 512,
    ("405b", 1 << 20): 1024,
}
"""The number of H200s for each size and length."""
TRAINING = {
    "layout": "layout",
    "weights per GPU": "weights",
    "optimizer per GPU": "optimizer",
    "activations per GPU": "activations",
    "logits per GPU": "logits",
    "peak per GPU": "peak",
    "operations per GPU and step": "operations",
    "ring traffic per GPU and step": "ring",
    "weights and gradients on the wire": "weights and gradients",
    "time to compute": "compute",
    "time of the wire": "wire",
    "tokens per second": "tokens per second",
}
SERVING = {
    "cache of one row": "cache",
    "GPUs to serve one row": "GPUs",
    "time to read the prompt": "prompt",
    "time per new token": "new token",
}


def replace_table(text: str, heading: str, rows: list[str]) -> str:
    """The page with new rows below a heading."""
    before, found, rest = text.partition(heading)
    assert found, heading
    return "".join((before, heading, "\n".join(rows), rest[rest.index("\n\n") :]))


def scale_table(columns: dict[str, str]) -> tuple[str, list[str]]:
    """(heading, rows) of a table of plans. columns: the figures to show and their short names."""
    trains = columns is TRAINING
    names = ["model", "tokens", *(["H200s"] if trains else []), "encoding", *columns.values()]
    heading = f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
    rows = []
    for (model, length), gpus in PLANS.items():
        for each in plan(model, length, gpus=gpus):
            cells = plan_cells(each)
            case = [model.upper(), f"{length:,}", *([f"{gpus:,}"] if trains else []), each.encoding]
            rows.append(f"| {' | '.join((*case, *(cells[name] for name in columns)))} |")
    return heading, rows


def scale_page(text: str) -> str:
    """docs/explanation/scale.md with its tables."""
    for columns in (TRAINING, SERVING):
        text = replace_table(text, *scale_table(columns))
    return text


def main() -> None:
    """Rewrite all tables."""
    recipes = [f"| `{name}` | {load_recipe(name).description} |" for name in available_recipes()]
    settings = [f"| `{name}` | {default} | {words} |" for name, default, words, *_ in list_fields(Recipe)]
    text = replace_table(PAGE.read_text(), "| recipe | |\n|---|---|\n", recipes)
    PAGE.write_text(replace_table(text, "| field | default | |\n|---|---|---|\n", settings))

    SCALE.write_text(scale_page(SCALE.read_text()))


if __name__ == "__main__":
    main()
