"""Tokens of pieces of text that are joined to one prompt."""

from typing import Any

from .tokens import make_encoder


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
