"""SCROLLS examples (Shaham et al., arXiv 2201.03533) from local files or the official data set.

Local files are JSON lines, one document per line:
{"task", "split", "doc_id", "document", "items": [{"id", "question", "choices" or null, "answers": [...]}]}
"""

import hashlib
import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runs.errors import first_line
from .text import JSON_LINES, candidate_paths, find_files, read_json_lines, read_streams

OFFICIAL = "tau/scrolls"
"""The official data set on the Hugging Face Hub, one archive per set. Its loading script, which `datasets` 4 no longer
runs, is not needed."""
PLACES = ("data/scrolls", "data/scrolls.tar.xz")
"""Where files are searched, relative to the working directory and to $EQUITAPE_DATA."""
SPLITS = {"valid": ("valid", "validation", "val", "dev"), "test": ("test",), "train": ("train",)}
OTHERWISE = (
    "Give a file, folder or archive with .jsonl files of it, or none: the official data set is then downloaded if "
    "there is a network."
)
"""How to get missing data."""
ELSEWHERE = {"squality": "github.com/nyu-mll/SQuALITY"}
"""Sets that are not in the official data set, and where they are published."""
ASKED = ("qasper", "contract_nli", "narrative_qa", "quality", "qmsum")
"""Sets whose official inputs begin with the question and a blank line."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question about a document."""

    id: str
    document: str
    question: str | None
    choices: tuple[str, ...] | None
    answers: tuple[str, ...]
    place: str = ""
    """File and line it was read from."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Items found, and their source."""

    items: list[Item]
    split: str
    source: str
    digest: str
    """Digest of all items."""


def load_examples(dataset: str, source: str | None = None, split: str | None = None) -> Examples:
    """The questions of a set. source: file, folder or archive. Default: the standard paths, then the official data.

    split: valid, test or train. Default: the first of these that exists.
    """
    if split is not None and split not in SPLITS:
        raise ValueError(f"SCROLLS has no split {split!r}; use {', '.join(SPLITS)}.")
    if source is not None:
        try:
            find_files(source)
        except ValueError as error:
            raise ValueError(f"The data of scrolls:{dataset} is missing: {error} {OTHERWISE}") from None
        return choose_split(dataset, source, read_local(dataset, source), split)
    looked = [str(place) for place in usual_places()]
    for place in usual_places():
        if place.exists():
            found = read_local(dataset, str(place))
            if any(found.values()):
                return choose_split(dataset, str(place), found, split)
    if dataset in ELSEWHERE:
        raise ValueError(
            f"The data of scrolls:{dataset} is missing. No .jsonl files of it in {', '.join(looked)}; SCROLLS "
            f"does not include it. Get it from {ELSEWHERE[dataset]} and give a file, folder or archive with data=PATH."
        )
    try:
        return choose_split(dataset, f"hf:{OFFICIAL}/{dataset}.zip", read_official(dataset, split), split)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        # the Hub and its cache raise various errors with long messages
        raise ValueError(
            f"The data of scrolls:{dataset} is missing. No .jsonl files of it in {', '.join(looked)}, and no "
            f"{dataset}.zip of the official data set {OFFICIAL!r} on the Hugging Face Hub ({first_line(error)}). Give "
            f"a file, folder or archive with data=PATH, or connect to a network to download the official one."
        ) from None


def usual_places() -> list[Path]:
    """Paths searched for local files: first all of the working directory."""
    return [place for places in zip(*map(candidate_paths, PLACES), strict=True) for place in places]


def choose_split(dataset: str, source: str, found: dict[str, list[Item]], split: str | None) -> Examples:
    """One split of the items found."""
    there = [name for name in SPLITS if found.get(name)]
    wanted = split or next(iter(there), None)
    if wanted not in there:
        missing = f"no split {wanted!r}, only {', '.join(there)}" if there else "no items of this set"
        raise ValueError(f"The data of scrolls:{dataset} is missing: {source!r} has {missing}. {OTHERWISE}")
    assert wanted is not None
    items = found[wanted]
    for item in items:
        # checked only for the wanted split: other splits are published without answers
        if not item.answers:
            raise ValueError(f"{item.place}: item {item.id!r} has no answers to score against; add some, or remove it.")
    content = json.dumps([[item.id, item.document, item.question, item.choices, item.answers] for item in items])
    return Examples(items=items, split=wanted, source=source, digest=hashlib.sha256(content.encode()).hexdigest())


def read_local(dataset: str, source: str) -> dict[str, list[Item]]:
    """Items of one set by split, from local files."""
    found: dict[str, list[Item]] = {}
    lines = (
        (f"Line {number} of {name}", row)
        for name, stream in read_streams(source)
        if name.endswith(JSON_LINES)
        for number, row in read_json_lines(name, stream)
    )
    for name, row in lines:
        if not isinstance(row, dict) or not isinstance(row.get("items"), list):
            # skip other files in the folder
            continue
        try:
            if row["task"] != dataset:
                continue
            split = next((split for split, names in SPLITS.items() if row["split"] in names), row["split"])
            for item in row["items"]:
                found.setdefault(split, []).append(
                    Item(
                        id=str(item["id"]),
                        document=row["document"],
                        question=item["question"],
                        choices=tuple(item["choices"]) if item.get("choices") else None,
                        answers=read_answers(item),
                        place=name,
                    )
                )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{name} does not have the SCROLLS format: task, split, document, items with id, "
                f"question, choices, answers ({type(error).__name__}: {error})."
            ) from None
    return found


def read_answers(item: dict[str, Any]) -> tuple[str, ...]:
    """The reference answers of an item; empty if it has none."""
    answers = item["answers"] or []
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise TypeError(f"the answers of item {item['id']!r} are not a list of strings")
    return tuple(answers)


def read_official(dataset: str, split: str | None) -> dict[str, list[Item]]:
    """Items of the official data set, which has answers only for its training and validation splits."""
    from huggingface_hub import hf_hub_download

    name = {"valid": "validation", None: "validation"}.get(split, split)
    path = hf_hub_download(OFFICIAL, f"{dataset}.zip", repo_type="dataset")
    # a question with several answers has one row per answer
    merged: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(path) as archive, archive.open(f"{dataset}/{name}.jsonl") as stream:
        for _, row in read_json_lines(path, stream):
            merged.setdefault(row["id"], {"input": row["input"], "answers": []})["answers"].append(row["output"])
    items = [make_official_item(dataset, key, row["input"], row["answers"]) for key, row in merged.items()]
    if any(answer is None for item in items for answer in item.answers):
        raise ValueError(f"the split {split!r} is published without answers")
    return {split or "valid": items}


def make_official_item(dataset: str, key: str, text: str, answers: list[str]) -> Item:
    """Split the official input into question and document."""
    question: str | None = None
    choices: tuple[str, ...] | None = None
    if dataset in ASKED:
        question, _, text = text.partition("\n\n")
    if dataset == "quality":
        listed, _, text = text.partition("\n\n")
        choices = tuple(" ".join(choice.split()) for choice in re.split(r" *\([A-D]\) *", listed)[1:])
        answers = [" ".join(answer.split()) for answer in answers]
    if dataset == "contract_nli":
        choices = ("Entailment", "Contradiction", "Not mentioned")
    return Item(id=key, document=text.strip(), question=question, choices=choices, answers=tuple(answers))
