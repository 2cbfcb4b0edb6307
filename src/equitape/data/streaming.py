"""Packed rows of documents that are streamed on demand, without a cache."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from .packing import ENDLESS, PackedDataset
from .text import Sources, read_documents
from .tokens import store_in_memory, tokenize


class StreamedRows(Dataset[dict[str, Tensor]]):
    """Numbered rows as in `PackedDataset`, packed block by block; request them in increasing order.

    Documents are read in order until they fill a block of `block_rows` rows, which is packed and shuffled. Row i
    depends only on the sources, length, block_rows, seed and i, so any number of workers and processes sees the same
    rows; each reads all documents. To resume, request a later row: this reads and skips what comes before. An earlier
    row restarts from the beginning.
    """

    def __init__(
        self,
        sources: Sources,
        tokenizer: Any,
        length: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        size: int = ENDLESS,
        min_tokens: int = 1,
        drop_remainders: bool = False,
        block_rows: int = 1024,
    ):
        """Arguments as in `PackedDataset`. size: the value of `len`, since the number of rows is unknown."""
        if block_rows < 1:
            raise ValueError(f"block_rows is {block_rows}; it must be at least 1.")
        # fail on missing sources before any work
        read_documents(sources)
        self.sources = sources
        self.tokenizer = tokenizer
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.size = size
        self.min_tokens = min_tokens
        self.drop_remainders = drop_remainders
        self.block_rows = block_rows
        self._restart()

    def _restart(self) -> None:
        self._blocks: Iterator[PackedDataset] | None = None
        self._block: PackedDataset | None = None
        self._first = self._stop = 0

    def __getstate__(self) -> dict[str, Any]:
        """Restart from the beginning in another process."""
        return {**self.__dict__, "_blocks": None, "_block": None, "_first": 0, "_stop": 0}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index < 0:
            raise IndexError(f"Row numbers start at 0; got {index}.")
        if index < self._first:
            self._restart()
        if self._blocks is None:
            self._blocks = self._read_blocks()
        while index >= self._stop:
            self._block = next(self._blocks)
            self._first, self._stop = self._stop, self._stop + len(self._block)
        assert self._block is not None
        return self._block[index - self._first]

    def _read_blocks(self) -> Iterator[PackedDataset]:
        """Blocks of documents, repeated without end."""
        number = count()
        least = max(self.min_tokens, self.length if self.drop_remainders else 1)
        for epoch in count():
            documents: list[np.ndarray] = []
            sizes: list[int] = []
            room = self.block_rows * self.length
            found = False
            for tokens, num_bytes in tokenize(read_documents(self.sources), self.tokenizer):
                if len(tokens) < least:
                    continue
                found = True
                documents.append(tokens)
                sizes.append(num_bytes)
                room -= len(tokens)
                if room <= 0:
                    yield self._pack(documents, sizes, next(number))
                    documents, sizes, room = [], [], self.block_rows * self.length
            if documents:
                yield self._pack(documents, sizes, next(number))
            if not found and epoch == 0:
                raise ValueError(
                    f"No document has {least} tokens; use longer documents or a smaller length or minimum."
                )

    def _pack(self, documents: list[np.ndarray], sizes: list[int], number: int) -> PackedDataset:
        return PackedDataset(
            store_in_memory(documents, sizes, self.tokenizer),
            self.length,
            # each block has its own order, as an epoch of a packed dataset
            seed=self.seed * 1_000_003 + number,
            shuffle=self.shuffle,
            drop_remainders=self.drop_remainders,
        )
