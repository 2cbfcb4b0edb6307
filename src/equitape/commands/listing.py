"""What `equitape encodings` and `equitape tasks` list, kept in listing.json so that both start without torch.

A test compares the file with the code. After a change of encodings, tasks or their options, write it again:
python -m equitape.commands.listing
"""

import json
from pathlib import Path
from typing import Any

from ..plugins import has_plugins

FILE = Path(__file__).with_name("listing.json")


def list_encodings() -> dict[str, dict[str, Any]]:
    """Every encoding: its idea, and its options with their defaults."""
    return find_encodings() if has_plugins() else json.loads(FILE.read_text())["encodings"]


def list_tasks() -> dict[str, dict[str, Any]]:
    """Every task: its idea, its first metric, and its options with their defaults."""
    return find_tasks() if has_plugins() else json.loads(FILE.read_text())["tasks"]


def find_encodings() -> dict[str, dict[str, Any]]:
    """As `list_encodings`, from the code."""
    from ..encodings import ENCODINGS
    from ..settings import describe_settings

    return {
        kind: {"idea": ENCODINGS[kind].idea, "options": describe_settings(ENCODINGS[kind].options_class)}
        for kind in ENCODINGS
    }


def find_tasks() -> dict[str, dict[str, Any]]:
    """As `list_tasks`, from the code."""
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
    """The content of the file, from the code."""
    return json.dumps({"encodings": find_encodings(), "tasks": find_tasks()}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_text())
