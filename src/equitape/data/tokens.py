"""The token cache: documents tokenized once, then read from disk through a memory map.

Shapes: T tokens of all documents, n documents.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .text import HUB_PREFIX, Document, Sources, find_files, list_sources, read_documents
from .tokenizers import is_byte_tokenizer

FORMAT = 1
TOKENS_FILE, STARTS_FILE, BYTES_FILE, FACTS_FILE = "tokens.bin", "starts.npy", "bytes.npy", "facts.json"
BATCH_CHARACTERS = 4_000_000
"""Text handed to the tokenizer at once: enough for all its threads, little beside the memory of a small machine."""


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """What a store says of itself."""

    vocab_size: int
    end_id: int | None
    """The token after every document; None where the tokenizer has none."""
    pad_id: int
    dtype: str
    digest: str
    """Of all tokens and boundaries: two stores with one digest hold the same documents."""
    format: int = FORMAT


class TokenStore:
    """Tokens of many documents, one after another, with their boundaries."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, num_bytes: np.ndarray, facts: TokenFacts):
        """tokens: [T]; starts: [n + 1], where each document begins, and the end; num_bytes: [n], UTF-8 of each."""
        self.tokens = tokens
        self.starts = starts
        self.num_bytes = num_bytes
        self.facts = facts

    @classmethod
    def open(cls, directory: str | Path) -> "TokenStore":
        """A store that `write_tokens` made."""
        folder = Path(directory)
        try:
            facts = TokenFacts(**json.loads((folder / FACTS_FILE).read_text()))
            starts, num_bytes = np.load(folder / STARTS_FILE), np.load(folder / BYTES_FILE)
            tokens = np.memmap(folder / TOKENS_FILE, dtype=facts.dtype, mode="r")
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{str(folder)!r} is no whole token cache ({error}); delete it to have it made again."
            ) from error
        if facts.format != FORMAT or len(tokens) != starts[-1] or len(starts) != len(num_bytes) + 1:
            raise ValueError(
                f"{str(folder)!r} is no whole token cache of this version; delete it to have it made again."
            )
        return cls(tokens, starts, num_bytes, facts)

    def __len__(self) -> int:
        """Documents."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, the end marks included."""
        return int(self.starts[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document: [n]."""
        return np.diff(self.starts)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Tokens from one place to another, as int64."""
        return torch.from_numpy(self.tokens[start:stop].astype(np.int64))

    def document(self, index: int, end: bool = True) -> torch.Tensor:
        """The tokens of one document, with its end mark or without."""
        stop = int(self.starts[index + 1])
        return self.read(int(self.starts[index]), stop if end or self.facts.end_id is None else stop - 1)


def build_tokens(sources: Sources, tokenizer: Any, directory: str | Path | None = None) -> TokenStore:
    """The tokens of some sources, from the cache where it has them: made again when a file or the tokenizer changes.

    directory: the cache, which may serve any number of sources; `default_cache()` when left out.
    """
    cache = Path(directory) if directory is not None else default_cache()
    home = cache / fingerprint(sources, tokenizer)
    if home.is_dir():
        try:
            return TokenStore.open(home)
        except ValueError:
            shutil.rmtree(home)
    write_tokens(read_documents(sources), tokenizer, home)
    return TokenStore.open(home)


def default_cache() -> Path:
    """Where token caches go: $EQUITAPE_CACHE, or .cache/equitape in the home directory."""
    return Path(os.environ.get("EQUITAPE_CACHE") or Path.home() / ".cache" / "equitape") / "tokens"


def write_tokens(documents: Iterable[Document], tokenizer: Any, directory: str | Path) -> None:
    """Tokenize documents into a new directory: written aside and renamed, so that it is there whole or not at all."""
    home = Path(directory)
    home.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    try:
        _write(documents, tokenizer, aside)
        try:
            aside.rename(home)
        except OSError:
            # another process was faster; its tokens are the same
            if not home.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(documents: Iterable[Document], tokenizer: Any, folder: Path) -> None:
    vocab_size, end_id = len(tokenizer), tokenizer.eos_token_id
    dtype = np.min_scalar_type(vocab_size - 1)
    lengths, num_bytes = [], []
    digest = hashlib.sha256()
    with (folder / TOKENS_FILE).open("wb") as file:
        for tokens, size in tokenize(documents, tokenizer):
            content = tokens.astype(dtype).tobytes()
            file.write(content)
            digest.update(content)
            lengths.append(len(tokens))
            num_bytes.append(size)
    if not lengths:
        raise ValueError("The data holds no text; give at least one document that is not empty.")
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    digest.update(starts.tobytes())
    np.save(folder / STARTS_FILE, starts)
    np.save(folder / BYTES_FILE, np.array(num_bytes, dtype=np.int64))
    pad_id = tokenizer.pad_token_id
    facts = TokenFacts(
        vocab_size=vocab_size,
        end_id=end_id,
        # a model that was trained without padding has no token for it; what stands there is never read
        pad_id=pad_id if pad_id is not None else end_id or 0,
        dtype=dtype.name,
        digest=digest.hexdigest(),
    )
    (folder / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=2))


def tokenize(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[np.ndarray, int]]:
    """For each document its tokens with the end mark, and its size in UTF-8 bytes; empty ones are left out."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    as_bytes = is_byte_tokenizer(tokenizer)
    for texts in _batches(documents):
        encoded: Sequence[Any]
        if as_bytes:
            encoded = [np.frombuffer(text.encode(), np.uint8) for text in texts]
        else:
            # names of special tokens inside a document are text; several texts at once run on all cores
            encoded = tokenizer(
                texts,
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
        for text, ids in zip(texts, encoded, strict=True):
            if len(ids):
                yield np.concatenate((np.asarray(ids, np.int64), np.array(end, np.int64))), len(text.encode())


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document.text)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def fingerprint(sources: Sources, tokenizer: Any) -> str:
    """A name for what these sources give under this tokenizer; files count by path, size and time of change."""
    digest = hashlib.sha256(f"format {FORMAT}".encode())
    for source in list_sources(sources):
        entries: list[Any] = [source]
        if not source.startswith(HUB_PREFIX):
            files, inside = find_files(source)
            for file in files:
                facts = file.stat()
                entries.append([str(file.resolve()), inside, facts.st_size, facts.st_mtime_ns])
        digest.update(json.dumps(entries).encode())
    digest.update(describe_tokenizer(tokenizer).encode())
    return digest.hexdigest()[:32]


def describe_tokenizer(tokenizer: Any) -> str:
    """Everything that decides which tokens a text becomes, as one string."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        content = json.loads(backend.to_str())
        # calls leave these behind; they do not change what is cached
        content.pop("truncation", None)
        content.pop("padding", None)
    return json.dumps([content, tokenizer.eos_token_id, tokenizer.pad_token_id], sort_keys=True)
