"""Data sets that recipes use: what they are, where they are expected, how to get them."""

import io
import itertools
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .text import SHIPPED, Document, candidate_paths, read_documents


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One data set."""

    about: str
    """Description in one sentence."""
    path: str
    """Expected path, relative to the working directory or, without `data/`, to $EQUITAPE_DATA."""
    splits: tuple[str, ...] = ()
    """Its splits as sources of text; empty if it is not read as plain text."""
    hub: str = ""
    """The data set on the Hugging Face Hub, as NAME or NAME:CONFIG; "" if it cannot be streamed."""
    limits: tuple[int, ...] = ()
    """Number of train, valid and test documents in a download."""
    heading: str = ""
    """Pattern of rows that start a document with several rows; "" for one row per document."""
    origin: str = ""
    """Web page of the data, or where to get it by hand."""
    licence: str = ""
    """Licence of the text."""

    def locate(self) -> Path | None:
        """Path of the file or folder on this machine, or None."""
        if self.path == "shipped":
            return SHIPPED
        alternatives = (self.path, self.path.removesuffix(".tar.xz"))
        found = (path for name in alternatives for path in candidate_paths(name) if path.exists())
        return next(found, None)


CATALOG = {
    "austen": DataSet(
        about="Two novels for training and seven chapters of a third for scoring; used by --small.",
        path="shipped",
        splits=("shipped:train", "shipped:valid"),
        origin="comes with the package",
        licence="public domain",
    ),
    "books": DataSet(
        about="Full books. A download has 30 of PG-19 for training, 3 for validation and 11 for testing.",
        path="data/books.tar.xz",
        splits=tuple(f"data/books.tar.xz/books/{split}" for split in ("train", "valid", "test")),
        hub="emozilla/pg19",
        limits=(30, 3, 11),
        origin="https://github.com/google-deepmind/pg19",
        licence="public domain in the USA",
    ),
    "wikitext": DataSet(
        about="Wikipedia articles. A download has 600 of WikiText-103 for training, 60 each for validation and test.",
        path="data/wikitext.tar.xz",
        splits=tuple(f"data/wikitext.tar.xz/wikitext/{split}" for split in ("train", "valid", "test")),
        hub="Salesforce/wikitext:wikitext-103-raw-v1",
        limits=(600, 60, 60),
        heading=r"\s*= [^=].*[^=] =\s*$",
        origin="https://huggingface.co/datasets/Salesforce/wikitext",
        licence="CC BY-SA",
    ),
    "proofs": DataSet(
        about="Formal and informal mathematics, as in proof-pile. It cannot be streamed from the Hub.",
        path="data/proofs.tar.xz",
        splits=tuple(f"data/proofs.tar.xz/proofs/{split}" for split in ("train", "valid", "test")),
        origin="https://github.com/zhangir-azerbayev/proof-pile",
        licence="by file",
    ),
    "scrolls": DataSet(
        about="Questions about long documents. The scrolls task downloads the official archives on demand.",
        path="data/scrolls.tar.xz",
        origin="https://huggingface.co/datasets/tau/scrolls",
        licence="by set",
    ),
}
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}


def data_folder() -> Path:
    """The download folder: $EQUITAPE_DATA, or `data` in the working directory."""
    return Path(os.environ.get("EQUITAPE_DATA") or "data").expanduser()


def download(name: str) -> Path:
    """Stream a data set from the Hugging Face Hub to an archive at its expected path."""
    entry = CATALOG[name]
    if not entry.hub:
        raise ValueError(f"Cannot download {name!r}; get it from {entry.origin} and put it at {entry.path}.")
    found = entry.locate()
    if found is not None:
        raise ValueError(f"{name!r} already exists: {found}. Move it away to download it again.")
    folder = data_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / Path(entry.path).name
    partial = target.with_name(f"{target.name}.partial")
    try:
        with tarfile.open(partial, "w:xz") as archive:
            for (split, hub_split), limit in zip(HUB_SPLITS.items(), entry.limits, strict=True):
                texts = join_rows((document.text for document in _stream(entry.hub, hub_split)), entry.heading)
                for number, text in enumerate(itertools.islice(texts, limit)):
                    content = text.encode()
                    member = tarfile.TarInfo(f"{name}/{split}/{number:06d}.txt")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def join_rows(rows: Iterable[str], heading: str) -> Iterator[str]:
    """Documents from rows: one per row, or with a pattern, a new one at every row that matches."""
    if not heading:
        yield from rows
        return
    parts: list[str] = []
    for row in rows:
        if re.match(heading, row) and parts:
            yield "".join(parts)
            parts = []
        parts.append(row)
    if parts:
        yield "".join(parts)


def _stream(hub: str, split: str) -> Iterator[Document]:
    """Documents of one split of a data set on the Hub."""
    name, _, config = hub.partition(":")
    return read_documents(f"hf:{name}:{config}:{split}")
