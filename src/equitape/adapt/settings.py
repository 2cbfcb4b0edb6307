"""The settings of a fine-tuning run; imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from ..pretrained.settings import AdaptSettings
from ..settings import Ge, Settings
from ..training.settings import TrainSettings

RATE_OF_ALL, RATE_OF_TAPE, RATE_OF_FEW = 2e-5, 2e-3, 1e-3
"""Learning rates where all weights train, where only TAPE's update does, and of all other methods.

Those of docs/results/extension-smollm2.md: the first is the paper's, the others were chosen on text of neither set."""
TRAIN_DEFAULTS: dict[str, Any] = {"batch_size": 8, "weight_decay": 0.0, "betas": (0.9, 0.95)}
"""Where fine-tuning departs from the defaults of training from scratch; see `train_defaults` for the learning rate."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    """Which texts are scored, at which lengths, how thoroughly."""

    data: dict[str, str] = field(default_factory=dict)
    """NAME=PATH of text to score before and after training. Default: the training data."""
    lengths: tuple[Annotated[int, Ge(1)], ...] = ()
    """Lengths to score at, in tokens, for example 1024,4096. Default: the context."""
    stride: Annotated[int, Ge(1)] | None = None
    """Tokens between the starts of two windows. Default: the length."""
    windows: Annotated[int, Ge(1)] | None = 32
    """Pieces of the longest length to score, spread evenly over each text; every length scores the same pieces."""

    def __post_init__(self) -> None:
        if self.stride is not None and self.lengths and self.stride > min(self.lengths):
            raise ValueError(
                f"stride is {self.stride}, more than the shortest length, {min(self.lengths)}, so that tokens would be "
                f"skipped; give {min(self.lengths)} or less."
            )


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Settings):
    """Data and course of a fine-tuning run."""

    data: tuple[str, ...]
    """Text to train on: a file, folder or archive."""
    train: TrainSettings
    """Budget, optimizer and bookkeeping."""
    row_length: Annotated[int, Ge(2)] | None = None
    """Tokens of a training row. Shorter rows than the context save memory; jumps then show its distances. Default: the
    context."""
    min_tokens: int = 1
    """Leave out documents shorter than this."""
    whole_rows: bool = False
    """Train only on rows that are one piece of one document. Otherwise the rests of documents share rows."""
    tokenizer: str | None = None
    """Folder of the tokenizer. Default: the base's."""
    cache: str | None = None
    """Folder for tokenized data. Default: equitape's cache in the home directory."""
    evaluation: EvalSettings = field(default_factory=EvalSettings)
    """What is scored before and after."""

    def check(self, context: int) -> None:
        """Refuse what does not fit the context."""
        if self.row_length is not None and self.row_length > context:
            raise ValueError(
                f"row_length is {self.row_length} and the context {context} tokens; rows can be as long as the context "
                f"at most."
            )
        if self.rows(context) < self.min_tokens:
            raise ValueError(
                f"Rows have {self.rows(context)} tokens and min_tokens is {self.min_tokens}: no document would fit "
                f"into a row. Use a longer context or a smaller minimum."
            )

    def rows(self, context: int) -> int:
        """Tokens of a training row."""
        return self.row_length or context


def train_defaults(settings: AdaptSettings) -> dict[str, Any]:
    """The defaults of training for a method, as `TrainSettings.parse` takes them."""
    method = settings.effects
    only_tape = method.tape and not method.lora and not settings.trains("embeddings") and not settings.trains("norms")
    rate = RATE_OF_ALL if method.everything else RATE_OF_TAPE if only_tape else RATE_OF_FEW
    return {**TRAIN_DEFAULTS, "learning_rate": rate, "seed": settings.seed}
