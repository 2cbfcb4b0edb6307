"""The token cache: documents tokenized once, then read from disk through a memory map.

Shapes: T tokens of all documents, n documents.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from ..runs.files import new_folder
from .text import Document, Sources, describe_sources, entry, read_documents
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

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        num_bytes: np.ndarray,
        facts: TokenFacts,
        directory: Path | None = None,
    ):
        """tokens: [T]; starts: [n + 1], where each document begins, and the end; num_bytes: [n], UTF-8 of each.

        directory: where a store on disk lies; one in memory has none.
        """
        self.tokens = tokens
        self.starts = starts
        self.num_bytes = num_bytes
        self.facts = facts
        self.directory = directory

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
        return cls(tokens, starts, num_bytes, facts, folder)

    def __reduce__(self) -> tuple[Any, ...]:
        """A store on disk goes to another process as its address, not as its tokens."""
        if self.directory is not None:
            return TokenStore.open, (self.directory,)
        return TokenStore, (self.tokens, self.starts, self.num_bytes, self.facts)

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

    def joined(self) -> torch.Tensor:
        """All documents as one, with the end marks between them."""
        return self.read(0, self.num_tokens)

    def document(self, index: int, end: bool = True) -> torch.Tensor:
        """The tokens of one document, with its end mark or without."""
        stop = int(self.starts[index + 1])
        return self.read(int(self.starts[index]), stop if end or self.facts.end_id is None else stop - 1)


def build_tokens(
    sources: Sources, tokenizer: Any, cache: str | Path | None = None, max_documents: int | None = None
) -> TokenStore:
    """The tokens of some sources, from the cache where it has them: made again when a file or the tokenizer changes.

    cache: a folder that may serve any number of sources, `default_cache()` when left out. max_documents: take only
    the first ones.
    """
    parts = (f"{FORMAT} {max_documents}", describe_sources(sources), describe_tokenizer(tokenizer))
    home = entry(cache, "tokens", *parts)
    if home.is_dir():
        try:
            return TokenStore.open(home)
        except ValueError:
            # another process may be at it too
            shutil.rmtree(home, ignore_errors=True)
    write_tokens(islice(read_documents(sources), max_documents), tokenizer, home)
    return TokenStore.open(home)


def write_tokens(documents: Iterable[Document], tokenizer: Any, directory: str | Path) -> None:
    """Tokenize documents into a new directory, which `TokenStore.open` reads."""
    with new_folder(Path(directory)) as folder:
        _write(documents, tokenizer, folder)


def _write(documents: Iterable[Document], tokenizer: Any, folder: Path) -> None:
    dtype = np.min_scalar_type(len(tokenizer) - 1)
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
    facts = TokenFacts(**special_tokens(tokenizer), dtype=dtype.name, digest=digest.hexdigest())
    (folder / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=2))


def store_in_memory(documents: Sequence[np.ndarray], num_bytes: Sequence[int], tokenizer: Any) -> TokenStore:
    """A store of a few documents that were tokenized already."""
    starts = np.concatenate(([0], np.cumsum([len(document) for document in documents], dtype=np.int64)))
    facts = TokenFacts(**special_tokens(tokenizer), dtype="int64", digest="")
    return TokenStore(np.concatenate(documents), starts, np.array(num_bytes, dtype=np.int64), facts)


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Size of the vocabulary, end mark and padding."""
    end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    # a model that was trained without padding has no token for it; what stands there is never read
    return {"vocab_size": len(tokenizer), "end_id": end_id, "pad_id": pad_id if pad_id is not None else end_id or 0}


def tokenize(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[np.ndarray, int]]:
    """For each document its tokens with the end mark, and its size in UTF-8 bytes; empty ones are left out."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encode = make_encoder(tokenizer)
    for texts in _batches(documents):
        for text, ids in zip(texts, encode(texts), strict=True):
            if len(ids):
                yield np.concatenate((np.asarray(ids, np.int64), np.array(end, np.int64))), len(text.encode())


def make_encoder(tokenizer: Any) -> Callable[[list[str]], Sequence[Any]]:
    """How texts become ids, fastest way first. Names of special tokens inside a document are text like any other."""
    if is_byte_tokenizer(tokenizer):
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda texts: tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    # a copy, since calls may have set truncation and padding on the original
    own = Tokenizer.from_str(backend.to_str())
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = True
    # without offsets, and on all cores
    return lambda texts: [encoded.ids for encoded in own.encode_batch_fast(texts, add_special_tokens=False)]


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


def describe_tokenizer(tokenizer: Any) -> str:
    """Everything that decides which tokens a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        content = json.loads(backend.to_str())
        # calls leave these behind; they do not change what is cached
        content.pop("truncation", None)
        content.pop("padding", None)
    return json.dumps([content, tokenizer.eos_token_id, tokenizer.pad_token_id], sort_keys=True)


class PieceTokenizer:
    """Tokens of pieces of text, without the special tokens that a tokenizer adds to a whole text."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._encode = make_encoder(tokenizer)

    def __call__(self, text: str) -> list[int]:
        return self.all([text])[0]

    def all(self, texts: list[str]) -> list[list[int]]:
        """Encode many pieces at once, which is faster."""
        return [list(map(int, ids)) for ids in self._encode(texts)]

    @property
    def beginning(self) -> list[int]:
        """The tokens in front of every text: [BOS], or none."""
        bare = self("a")
        whole = self.tokenizer("a")["input_ids"]
        return whole[: whole.index(bare[0])] if bare and bare[0] in whole else []
