"""equitape encodings and equitape tasks. Both read listing.json, so that they start without torch.

A test compares the file with the code. After changing encodings, tasks or their options, regenerate it:
python -m equitape.commands.listing
"""

import json as json_format
from pathlib import Path
from typing import Any

from rich.console import Console

from ..plugins import has_plugins
from .options import AsJson, print_json, table_of

FILE = Path(__file__).with_name("listing.json")


def encodings(json: AsJson = False) -> None:
    """List the encodings and their options."""
    rows = list_encodings()
    if json:
        print_json({kind: row["options"] for kind, row in rows.items()}, indent=2)
        return
    shown = []
    for kind, row in rows.items():
        # of nested options, show only the kind; the documentation has the rest
        options = {
            name: next(iter(value.values())) if isinstance(value, dict) else value
            for name, value in row["options"].items()
        }
        shown.append((kind, row["idea"], ", ".join(f"{name}={value}" for name, value in options.items())))
    console = Console()
    console.print(table_of(("encoding", "idea", "options and defaults"), shown))
    console.print("Documentation: docs/reference/encodings. --json prints nested options in full.")


def tasks(json: AsJson = False) -> None:
    """List the tasks to train on and to evaluate, and their options."""
    rows = list_tasks()
    if json:
        print_json(rows, indent=2)
        return
    shown = []
    for name, row in rows.items():
        for described in (row, row.get("evaluation")):
            if described is not None:
                can = row["can"] if row["can"] != "both" else "train" if described is row else "evaluate"
                options = ", ".join(f"{option}={value}" for option, value in described["options"].items())
                shown.append((name, can, f"{described['idea']}\nmetric: {described['headline']}", options))
    console = Console()
    # the metric goes under the idea: a column for it would leave too little of 80 characters for the options
    console.print(table_of(("task", "can", "idea and first metric", "options and defaults"), shown))
    console.print(
        "train: name it in a recipe (docs/reference/tasks). evaluate: equitape eval --task (docs/how-to/evaluation.md)."
    )


def list_encodings() -> dict[str, dict[str, Any]]:
    """Every encoding: its idea, and its options with their defaults."""
    return find_encodings() if has_plugins() else json_format.loads(FILE.read_text())["encodings"]


def list_tasks() -> dict[str, dict[str, Any]]:
    """Every task: its idea, its first metric, and its options with their defaults."""
    return find_tasks() if has_plugins() else json_format.loads(FILE.read_text())["tasks"]


def find_encodings() -> dict[str, dict[str, Any]]:
    """`list_encodings`, computed from the code."""
    from ..encodings import ENCODINGS
    from ..settings import describe_settings

    return {
        kind: {"idea": ENCODINGS[kind].idea, "options": describe_settings(ENCODINGS[kind].options_class)}
        for kind in ENCODINGS
    }


def find_tasks() -> dict[str, dict[str, Any]]:
    """`list_tasks`, computed from the code."""
    from ..settings import describe_settings
    from ..tasks import EVALUATIONS, TASKS, abilities

    def describe(cls: Any) -> dict[str, Any]:
        return {
            "idea": cls.idea,
            "headline": cls.headline,
            "higher_is_better": cls.higher_is_better,
            "options": describe_settings(cls.options_class),
        }

    rows: dict[str, dict[str, Any]] = {}
    for name, can in abilities().items():
        rows[name] = {"can": can, **describe(TASKS[name] if can != "evaluate" else EVALUATIONS[name])}
        if can == "both":
            rows[name]["evaluation"] = describe(EVALUATIONS[name])
    return rows


def as_text() -> str:
    """The content of listing.json, computed from the code."""
    return json_format.dumps({"encodings": find_encodings(), "tasks": find_tasks()}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_text())
