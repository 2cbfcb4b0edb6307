"""The layout of a run folder."""

import hashlib
import re
from pathlib import Path

RUNS = "runs"
"""Where a comparison keeps its runs."""


def model_folder(name: str) -> str:
    """The folder with a model's weights and tokenizer: `model/` in a run folder."""
    inner = Path(name).expanduser() / "model"
    return str(inner) if (inner / "config.json").is_file() else name


def runs_within(name: str) -> list[str]:
    """The trained runs in the folder of a comparison; none in other folders."""
    return sorted(str(file.parents[1]) for file in (Path(name).expanduser() / RUNS).glob("*/model/config.json"))


MOST_CHARACTERS = 100
DIGEST_CHARACTERS = 8


def file_name(text: str) -> str:
    """A name as one path component: letters, digits, dots, underscores and hyphens, at most 100 characters.

    Other characters become hyphens. A digest is added if that could make two names collide, or if the name is too long,
    "." or "..".
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    # punctuation and spaces may collide with a hyphen; letters of other scripts must not
    lost_letters = any(character.isalnum() and not character.isascii() for character in text)
    if name.strip(".-") and len(name) <= MOST_CHARACTERS and not lost_letters:
        return name
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]
    return f"{name.strip('.-')[: MOST_CHARACTERS - DIGEST_CHARACTERS - 1]}-{digest}".lstrip("-")
