"""Pack documents of any length into rows of one length.

Long documents are cut into full rows; their ends and short documents share rows as segments. The first token of a
segment has no label, so nothing is predicted across a boundary. Shapes: L row length, P pieces.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..registry import counted
from .tokens import TokenStore

IGNORED = -100
ENDLESS = 10**9
"""Length of a dataset without end."""
PADDING_SEGMENT = 0


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """Counts of packed, padded and skipped tokens in one epoch."""

    documents: int
    tokens: int
    rows: int
    padding: int
    """Padding positions in all rows."""
    skipped_documents: int
    """Documents shorter than the minimum."""
    dropped_tokens: int
    """Tokens of skipped documents and dropped remainders."""

    def __str__(self) -> str:
        places = self.tokens + self.padding
        text = (
            f"{counted(self.documents, 'document')}, {counted(self.tokens, 'token')} in {counted(self.rows, 'row')}, "
        )
        text += f"{self.padding / places:.2%} padding"
        if self.dropped_tokens:
            skipped, dropped = counted(self.skipped_documents, "document"), counted(self.dropped_tokens, "token")
            text += f"; skipped: {skipped}, {dropped} in total"
        return text


class Layout(NamedTuple):
    """The pieces of the store in each row."""

    starts: np.ndarray
    """[P]: start of each piece in the store."""
    sizes: np.ndarray
    """[P]: tokens per piece."""
    rows: np.ndarray
    """[rows + 1]: first piece of each row, and the end."""


def numbered_generator(seed: int, number: int) -> torch.Generator:
    """The random stream of a numbered block or epoch."""
    # a large odd multiplier separates the random streams of neighbouring seeds
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)


class EpochOrder:
    """Maps indices that continue through the epochs to rows, in another random order in every epoch."""

    def __init__(self, size: int, seed: int):
        self.size = size
        self.seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self.size)
        if epoch != self._epoch:
            self._order = torch.randperm(self.size, generator=numbered_generator(self.seed, epoch))
            self._epoch = epoch
        return int(self._order[place])


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Numbered rows of `input_ids`, `labels` and, for rows of several pieces, `segment_ids`, all [L] int64.

    Row i depends only on store, length, seed and i. Every epoch has its own order, and row numbers continue through the
    epochs without end.
    """

    def __init__(
        self,
        store: TokenStore,
        length: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        size: int | None = None,
        min_tokens: int = 1,
        drop_remainders: bool = False,
    ):
        """size: the value of `len`. Default: one epoch. min_tokens: skip shorter documents.

        drop_remainders: keep only rows of one piece, for long-context training.
        """
        self.store = store
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.layout, self.report = lay_out(store, length, min_tokens, drop_remainders)
        self.size = size if size is not None else self.report.rows
        self._shuffled = EpochOrder(self.report.rows, seed)

    @property
    def summary(self) -> str:
        """A sentence about the rows."""
        return f"{self.report}."

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index < 0:
            raise IndexError(f"Row numbers start at 0; got {index}.")
        return self.row(self._shuffled[index] if self.shuffle else index % self.report.rows)

    def row(self, number: int) -> dict[str, Tensor]:
        """A row by its index in the layout."""
        first, last = int(self.layout.rows[number]), int(self.layout.rows[number + 1])
        tokens = torch.full((self.length,), self.store.facts.pad_id)
        labels = torch.full((self.length,), IGNORED)
        segments = torch.full((self.length,), PADDING_SEGMENT)
        place = 0
        for segment, piece in enumerate(range(first, last), start=PADDING_SEGMENT + 1):
            start, size = int(self.layout.starts[piece]), int(self.layout.sizes[piece])
            held = self.store.read(start, start + size)
            tokens[place : place + size] = held
            labels[place + 1 : place + size] = held[1:]
            segments[place : place + size] = segment
            place += size
        row = {"input_ids": tokens, "labels": labels}
        if last - first > 1 or place < self.length:
            row["segment_ids"] = segments
        return row


def collate_rows(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows of one length. `segment_ids` appear only if a row has them, since plain causal rows are faster."""
    names = ["input_ids", "labels"]
    if any("segment_ids" in row for row in rows):
        names.append("segment_ids")
    whole = torch.full_like(rows[0]["input_ids"], PADDING_SEGMENT + 1)
    return {name: torch.stack([row.get(name, whole) for row in rows]) for name in names}


def lay_out(
    store: TokenStore, length: int, min_tokens: int = 1, drop_remainders: bool = False
) -> tuple[Layout, PackingReport]:
    """Assign tokens to rows."""
    if length < 2:
        raise ValueError(f"Row length is {length}; it must be at least 2, since the first token is never predicted.")
    lengths = store.lengths
    wanted = max(min_tokens, length if drop_remainders else 1)
    kept = np.flatnonzero(lengths >= wanted)
    if not len(kept):
        raise ValueError(
            f"No document has {wanted} tokens; the longest has {int(lengths.max())}. Use longer documents or a smaller "
            f"length or minimum."
        )
    counts = lengths[kept] // length
    begins = store.starts[:-1][kept]
    # full rows of every document in order: index of the row within its document
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + nth * length
    sizes = np.full(len(starts), length, dtype=np.int64)
    rows = np.arange(len(starts) + 1)
    if not drop_remainders:
        left = lengths[kept] % length
        short = np.flatnonzero(left)
        bins = pack_pieces(left[short].tolist(), length)
        order = np.array([piece for pieces in bins for piece in pieces], dtype=np.int64)
        chosen = short[order]
        starts = np.concatenate((starts, begins[chosen] + counts[chosen] * length))
        sizes = np.concatenate((sizes, left[chosen]))
        ends = np.cumsum([len(pieces) for pieces in bins], dtype=np.int64)
        rows = np.concatenate((rows, rows[-1] + ends))
    tokens = int(sizes.sum())
    report = PackingReport(
        documents=len(kept),
        tokens=tokens,
        rows=len(rows) - 1,
        padding=(len(rows) - 1) * length - tokens,
        skipped_documents=len(lengths) - len(kept),
        dropped_tokens=store.num_tokens - tokens,
    )
    return Layout(starts, sizes, rows), report


def pack_pieces(sizes: list[int], length: int) -> list[list[int]]:
    """Best-fit decreasing: place the largest piece first, each into the fullest row that has room.

    Returns the pieces of each row in the order they were placed.
    """
    rows: list[list[int]] = []
    # rows with room, by remaining space; and the sorted list of spaces
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for piece in sorted(range(len(sizes)), key=lambda piece: (-sizes[piece], piece)):
        size = sizes[piece]
        place = bisect_left(rooms, size)
        if place < len(rooms):
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        room -= size
        if room:
            if room not in with_room:
                with_room[room] = []
                insort(rooms, room)
            with_room[room].append(row)
    return rows
