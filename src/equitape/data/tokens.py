"""The token cache: documents are tokenized once, then read from disk through a memory map.

Shapes: T tokens of all documents, n documents.
"""

import hashlib
import json
import shutil
import tempfile
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
"""Characters per tokenizer call: enough for all its threads, small compared with memory."""


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """Description of a token store."""

    vocab_size: int
    end_id: int | None
    """The token after every document; None if the tokenizer has none."""
    pad_id: int
    dtype: str
    digest: str
    """Digest of all tokens and boundaries: equal digests mean equal documents."""
    format: int = FORMAT


class TokenStore:
    """Concatenated tokens of many documents, with their boundaries."""

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        num_bytes: np.ndarray,
        facts: TokenFacts,
        directory: Path | None = None,
    ):
        """tokens: [T]. starts: [n + 1], start of each document, and the end. num_bytes: [n], UTF-8 bytes of each.

        directory: folder of a store on disk; None for one in memory.
        """
        self.tokens = tokens
        self.starts = starts
        self.num_bytes = num_bytes
        self.facts = facts
        self.directory = directory

    @classmethod
    def open(cls, directory: str | Path) -> "TokenStore":
        """Open a store written by `write_tokens`."""
        folder = Path(directory)
        try:
            facts = TokenFacts(**json.loads((folder / FACTS_FILE).read_text()))
            starts, num_bytes = np.load(folder / STARTS_FILE), np.load(folder / BYTES_FILE)
            tokens = np.memmap(folder / TOKENS_FILE, dtype=facts.dtype, mode="r")
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{str(folder)!r} is a damaged token cache ({error}); delete it to rebuild it.") from error
        if facts.format != FORMAT or len(tokens) != starts[-1] or len(starts) != len(num_bytes) + 1:
            raise ValueError(
                f"{str(folder)!r} is a damaged token cache or one of another version; delete it to rebuild it."
            )
        return cls(tokens, starts, num_bytes, facts, folder)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a store on disk as its path, not its tokens."""
        if self.directory is not None:
            return TokenStore.open, (self.directory,)
        return TokenStore, (self.tokens, self.starts, self.num_bytes, self.facts)

    def __len__(self) -> int:
        """Documents."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all documents, including end tokens."""
        return int(self.starts[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document: [n]."""
        return np.diff(self.starts)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Tokens from one position to another, as int64."""
        return torch.from_numpy(self.tokens[start:stop].astype(np.int64))

    def joined(self) -> torch.Tensor:
        """All documents as one, with end tokens between them."""
        return self.read(0, self.num_tokens)

    def document(self, index: int, end: bool = True) -> torch.Tensor:
        """The tokens of one document, with or without its end token."""
        stop = int(self.starts[index + 1])
        return self.read(int(self.starts[index]), stop if end or self.facts.end_id is None else stop - 1)


def build_tokens(
    sources: Sources, tokenizer: Any, cache: str | Path | None = None, max_documents: int | None = None
) -> TokenStore:
    """The tokens of some sources, from the cache if neither the files nor the tokenizer changed.

    cache: a folder for any number of sources. Default: `default_cache()`. max_documents: read only the first documents.
    """
    parts = (f"{FORMAT} {max_documents}", describe_sources(sources), describe_tokenizer(tokenizer))
    home = entry(cache, "tokens", *parts)
    if home.is_dir():
        try:
            return TokenStore.open(home)
        except ValueError:
            # another process may be writing it too
            shutil.rmtree(home, ignore_errors=True)
    write_tokens(islice(read_documents(sources), max_documents), tokenizer, home)
    return TokenStore.open(home)


def write_tokens(documents: Iterable[Document], tokenizer: Any, directory: str | Path) -> None:
    """Tokenize documents into a new directory for `TokenStore.open`."""
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
        raise ValueError("The data has no text; give at least one non-empty document.")
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    digest.update(starts.tobytes())
    np.save(folder / STARTS_FILE, starts)
    np.save(folder / BYTES_FILE, np.array(num_bytes, dtype=np.int64))
    facts = TokenFacts(**special_tokens(tokenizer), dtype=dtype.name, digest=digest.hexdigest())
    (folder / FACTS_FILE).write_text(json.dumps(asdict(facts), indent=2))


def store_in_memory(documents: Sequence[np.ndarray], num_bytes: Sequence[int], tokenizer: Any) -> TokenStore:
    """An in-memory store of tokenized documents."""
    starts = np.concatenate(([0], np.cumsum([len(document) for document in documents], dtype=np.int64)))
    facts = TokenFacts(**special_tokens(tokenizer), dtype="int64", digest="")
    return TokenStore(np.concatenate(documents), starts, np.array(num_bytes, dtype=np.int64), facts)


def special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Vocabulary size, end token and padding token."""
    end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    # a model trained without padding has no padding token; the value there is never read
    return {"vocab_size": len(tokenizer), "end_id": end_id, "pad_id": pad_id if pad_id is not None else end_id or 0}


def tokenize(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[np.ndarray, int]]:
    """Tokens with the end token, and UTF-8 bytes, of each non-empty document."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encode = make_encoder(tokenizer)
    for texts in _batches(documents):
        for text, ids in zip(texts, encode(texts), strict=True):
            if len(ids):
                yield np.concatenate((np.asarray(ids, np.int64), np.array(end, np.int64))), len(text.encode())


def make_encoder(tokenizer: Any) -> Callable[[list[str]], Sequence[Any]]:
    """The fastest available encoder. Names of special tokens inside a document are encoded as plain text."""
    if is_byte_tokenizer(tokenizer):
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda texts: tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    # a copy, since earlier calls may have set truncation and padding on the original
    own = Tokenizer.from_str(backend.to_str())
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = True
    # without offsets, on all cores
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
    """Everything that affects how text is tokenized."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = {
            "class": type(tokenizer).__name__,
            "vocabulary": tokenizer.get_vocab(),
            "files": _vocabulary_files(tokenizer),
            "settings": _plain_settings(tokenizer),
        }
    else:
        content = json.loads(backend.to_str())
        # earlier calls set these; they do not affect the cached tokens
        content.pop("truncation", None)
        content.pop("padding", None)
    return json.dumps([content, tokenizer.eos_token_id, tokenizer.pad_token_id], sort_keys=True)


def _vocabulary_files(tokenizer: Any) -> dict[str, str]:
    """Digests of the files of a tokenizer in Python: merges and models decide as much as the vocabulary."""
    if not hasattr(tokenizer, "save_vocabulary"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_vocabulary(folder)
        except NotImplementedError:
            return {}
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in Path(folder).iterdir()}


def _plain_settings(tokenizer: Any) -> dict[str, Any]:
    """Switches such as do_lower_case, without paths, which differ between machines."""
    given = getattr(tokenizer, "init_kwargs", {})
    return {name: value for name, value in given.items() if isinstance(value, bool)}


class PieceTokenizer:
    """Tokenizes pieces of text, without the special tokens that a tokenizer adds to a full text."""

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
        """The tokens before every text: [BOS], or none."""
        bare = self("a")
        whole = self.tokenizer("a")["input_ids"]
        return whole[: whole.index(bare[0])] if bare and bare[0] in whole else []
