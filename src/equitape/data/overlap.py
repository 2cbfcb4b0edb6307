"""How much of one text also occurs in another, by content, independent of file names and paths.

The text to score is cut into windows of about `WINDOW_BYTES` bytes that do not overlap; a window counts if the same
tokens occur anywhere in the training text. Documents shorter than a window are not compared.

Shapes: T tokens, W tokens of a window.
"""

from dataclasses import dataclass

import numpy as np

from ..registry import counted
from .tokens import TokenStore

WINDOW_BYTES = 128
"""Long enough that common phrases do not count, short enough that a copied paragraph does."""
CHUNK_TOKENS = 4_000_000
"""Training tokens compared at once: about 100 MB."""
TABLE_BITS = 22


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How much of a scored text occurs in the training text."""

    windows: int
    """Windows compared."""
    found: int
    """Number of these that also occur in the training text."""
    documents: int
    """Documents with at least one such window."""

    @property
    def share(self) -> float:
        """From 0 to 1; 0 if nothing could be compared."""
        return self.found / self.windows if self.windows else 0.0


def find_overlap(training: TokenStore, scored: TokenStore) -> Overlap:
    """Compare two texts tokenized by the same tokenizer."""
    size = window_size(scored)
    documents, hashes = [], []
    for number in range(len(scored)):
        start, stop = int(scored.starts[number]), int(scored.starts[number + 1])
        stop -= scored.facts.end_id is not None
        found = hash_windows(scored.tokens[start:stop], size)[::size]
        hashes.append(found)
        documents.append(np.full(len(found), number))
    wanted = np.concatenate(hashes)
    if not len(wanted):
        return Overlap(windows=0, found=0, documents=0)
    seen = np.isin(wanted, _occurring(training, np.unique(wanted), size))
    return Overlap(
        windows=len(wanted), found=int(seen.sum()), documents=len(np.unique(np.concatenate(documents)[seen]))
    )


def describe_overlap(name: str, overlap: Overlap) -> str:
    """A warning in two sentences; empty without overlap."""
    if not overlap.found:
        return ""
    share = f"{overlap.share:.1%}" if overlap.share >= 0.0005 else "Less than 0.1%"
    return (
        f"{share} of {name} also occurs in the training data ({counted(overlap.documents, 'document')}), so its scores "
        f"partly measure memorization. Train on one split and score another."
    )


def window_size(store: TokenStore) -> int:
    """Tokens of a window: a power of two, about WINDOW_BYTES of the text."""
    tokens = WINDOW_BYTES * store.num_tokens / max(1, int(store.num_bytes.sum()))
    return 1 << max(3, round(np.log2(max(1.0, tokens))))


def hash_windows(tokens: np.ndarray, size: int) -> np.ndarray:
    """Hashes of every window of `size` tokens, a power of two: [T] -> [T - W + 1] uint64. Empty if T < W."""
    if len(tokens) < size:
        return np.empty(0, np.uint64)
    hashes = _mix(tokens.astype(np.uint64))
    width = 1
    while width < size:
        # the hash of the first half is mixed, so that order matters
        hashes = _mix(hashes[:-width]) + hashes[width:]
        width *= 2
    return hashes


def _mix(values: np.ndarray) -> np.ndarray:
    """A permutation of uint64 that spreads neighbours (the last step of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(0x9E3779B97F4A7C15)
    return (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)


def _occurring(training: TokenStore, wanted: np.ndarray, size: int) -> np.ndarray:
    """Which of the sorted hashes occur in the training text."""
    # a small table decides nearly every window with one lookup
    table = np.zeros(1 << TABLE_BITS, dtype=bool)
    shift = np.uint64(64 - TABLE_BITS)
    table[wanted >> shift] = True
    found: list[np.ndarray] = []
    for start in range(0, training.num_tokens, CHUNK_TOKENS):
        hashes = hash_windows(training.tokens[start : start + CHUNK_TOKENS + size - 1], size)
        maybe = hashes[table[hashes >> shift]]
        found.append(np.intersect1d(maybe, wanted))
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)
