"""Settings of a fine-tuning run; imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from ..pretrained.settings import AdaptSettings
from ..settings import Ge, Settings
from ..training.settings import Share, TrainSettings

RATE_OF_ALL, RATE_OF_TAPE, RATE_OF_FEW = 2e-5, 2e-3, 1e-3
"""Learning rates if all weights train, if only TAPE's update trains, and for all other methods.

From docs/results/extension-smollm2.md: the first is the paper's, the others were tuned on text of neither set."""
TRAIN_DEFAULTS: dict[str, Any] = {"batch_size": 8, "weight_decay": 0.0, "betas": (0.9, 0.95)}
"""Defaults that differ from training from scratch; see `train_defaults` for the learning rate."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    """Which texts are scored, at which lengths, on how many windows."""

    data: dict[str, str] = field(default_factory=dict)
    """NAME=PATH of a text to score before and after training. Default: the training data."""
    lengths: tuple[Annotated[int, Ge(1)], ...] = ()
    """Lengths to score at, in tokens, for example 1024,4096. Default: the context."""
    stride: Annotated[int, Ge(1)] | None = None
    """Tokens between the starts of consecutive windows. Default: the length."""
    windows: Annotated[int, Ge(1)] | None = 32
    """Pieces of the longest length to score, evenly spaced in each text; every length scores the same pieces."""

    def __post_init__(self) -> None:
        if self.stride is not None and self.lengths and self.stride > min(self.lengths):
            raise ValueError(
                f"stride is {self.stride}, more than the shortest length, {min(self.lengths)}, which skips tokens; "
                f"set it to {min(self.lengths)} or less."
            )


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Settings):
    """Data and training of a fine-tuning run."""

    data: tuple[str, ...]
    """Text to train on: a file, folder or archive."""
    train: TrainSettings
    """Budget, optimizer, logging and checkpoints."""
    row_length: Annotated[int, Ge(2)] | None = None
    """Tokens per training row. Rows shorter than the context save memory; jumps then cover its distances. Default: the
    context."""
    min_tokens: int = 1
    """Skip documents shorter than this."""
    whole_rows: bool = False
    """Train only on rows that are one piece of one document. Otherwise, the ends of documents share rows."""
    recall: Share = 0.0
    """Fraction of the rows in which facts are planted and asked for at the end, to train finding things far back."""
    tokenizer: str | None = None
    """Folder of the tokenizer. Default: the base's."""
    cache: str | None = None
    """Folder for tokenized data. Default: equitape's cache in the home directory."""
    evaluation: EvalSettings = field(default_factory=EvalSettings)
    """Perplexity before and after training."""

    def check(self, context: int) -> None:
        """Raise ValueError if the settings do not fit the context."""
        if self.row_length is not None and self.row_length > context:
            raise ValueError(f"row_length is {self.row_length}; it must be at most the context, {context} tokens.")
        if self.rows(context) < self.min_tokens:
            raise ValueError(
                f"Rows have {self.rows(context)} tokens and min_tokens is {self.min_tokens}: no document fits in "
                f"a row. Use a longer context or a smaller minimum."
            )

    def rows(self, context: int) -> int:
        """Tokens of a training row."""
        return self.row_length or context


def train_defaults(settings: AdaptSettings) -> dict[str, Any]:
    """The training defaults of a method, as input of `TrainSettings.parse`."""
    method = settings.effects
    only_tape = method.tape and not method.lora and not settings.trains("embeddings") and not settings.trains("norms")
    rate = RATE_OF_ALL if method.everything else RATE_OF_TAPE if only_tape else RATE_OF_FEW
    return {**TRAIN_DEFAULTS, "learning_rate": rate, "seed": settings.seed}
