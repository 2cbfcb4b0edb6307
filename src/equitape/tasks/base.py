"""The interface of a training task: it makes examples and scores the trained model.

Examples are numbered, and example i depends only on the seed and on i: not on the batch size, the number of workers or
processes, or how often a run was interrupted. Shapes: n examples, T tokens.
"""

import hashlib
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ..data.packing import ENDLESS, IGNORED, numbered_generator
from ..runs.results import KNOWN_METRICS, Curve, Evaluation, HeatMap, Metric, TaskResult
from ..settings import Settings

__all__ = [
    "ENDLESS", "IGNORED", "Curve", "Evaluation", "HeatMap", "NumberedExamples", "Task", "evaluation_generator",
    "pad_right",
]  # fmt: skip


class TaskBase:
    """Shared by training tasks and evaluation tasks."""

    name: ClassVar[str]
    idea: ClassVar[str]
    """One line that helps to choose a task."""
    options_class: ClassVar[type[Settings]] = Settings
    headline: ClassVar[str]
    """The metric that reports show first."""
    higher_is_better: ClassVar[bool] = True
    """Whether a higher value of the headline is better."""
    metrics: ClassVar[tuple[Metric, ...]] = KNOWN_METRICS
    """Direction and unit of each metric."""


def describe_task(task: TaskBase | type[TaskBase], **known: Any) -> TaskResult:
    """What results keep of a task. known: its lengths and a warning."""
    names = ("name", "idea", "headline", "higher_is_better", "metrics")
    return TaskResult(**{name: getattr(task, name) for name in names}, **known)


class Task(TaskBase):
    """A training task with its options. Subclasses register under a name and override everything below."""

    vocab_size: int
    pad_token_id: int
    eos_token_id: int | None = None
    bos_token_id: int | None = None

    def __init__(self, options: Settings):
        self.options = options

    def lengths(self) -> tuple[int, int]:
        """`trained_length` and `tested_length`."""
        raise NotImplementedError

    @property
    def trained_length(self) -> int:
        """Tokens of the longest training example."""
        return self.lengths()[0]

    @property
    def tested_length(self) -> int:
        """Tokens of the longest evaluated sequence, including the answer."""
        return self.lengths()[1]

    @property
    def data_digest(self) -> str | None:
        """Digest of the data files, to detect changes; None for generated data."""
        return None

    @property
    def warning(self) -> str:
        """A warning about the data for readers of the scores, or an empty string."""
        return ""

    def training_set(self, seed: int) -> Dataset[dict[str, Tensor]]:
        """Indexed examples: `input_ids`, `labels` and, if needed, `segment_ids`, all [T]."""
        raise NotImplementedError

    def collate(self, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch, padded on the right to its longest example, with `attention_mask` if anything is padded."""
        return pad_right(examples, self.pad_token_id)

    def evaluate(self, model: Any, seed: int, share: float = 1.0) -> Evaluation:
        """Score a model in evaluation mode. share: fraction of the full evaluation, at most 1."""
        raise NotImplementedError


def pad_right(examples: list[dict[str, Tensor]], pad_token_id: int) -> dict[str, Tensor]:
    """Stack examples [T] of different lengths into [n, T]; only padding is masked."""
    fill = {"input_ids": pad_token_id, "labels": IGNORED}
    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    longest = int(lengths.max())
    batch = {
        name: pad_sequence([example[name] for example in examples], True, fill.get(name, 0)) for name in examples[0]
    }
    if int(lengths.min()) < longest:
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch


class NumberedExamples(Dataset[dict[str, Tensor]]):
    """An endless dataset made in blocks: the generator of block b is seeded by (seed, b)."""

    def __init__(self, make_block: Any, seed: int, size: int = ENDLESS, block_size: int = 256):
        """make_block(count, generator) gives a dictionary of [count, T] tensors with a column `lengths` [count].

        Read in order: an index in another block than the one before it makes that whole block anew.
        """
        self.make_block = make_block
        self.seed = seed
        self.size = size
        self.block_size = block_size
        self._number = -1
        self._rows: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, row = divmod(index, self.block_size)
        if number != self._number:
            self._rows, self._number = self._make_rows(number), number
        return dict(self._rows[row])

    def _make_rows(self, number: int) -> list[dict[str, Tensor]]:
        block = dict(self.make_block(self.block_size, numbered_generator(self.seed, number)))
        lengths = block.pop("lengths")
        # split each tensor in one call: slicing row by row costs more than making the examples
        columns = []
        for values in block.values():
            counted = torch.arange(values.shape[1]) < lengths[:, None]
            columns.append(values.masked_select(counted).split(lengths.tolist()))
        return [dict(zip(block, row, strict=True)) for row in zip(*columns, strict=True)]


def evaluation_generator(seed: int, *place: int) -> torch.Generator:
    """A generator for one part of an evaluation, independent of all other parts and their order."""
    digest = hashlib.sha256(f"evaluation {seed} {place}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def require_order(**sizes: float) -> None:
    """Raise ValueError unless the sizes increase in the given order."""
    values = list(sizes.values())
    if any(after <= before for before, after in pairwise(values)):
        given = ", ".join(f"{name} {value}" for name, value in sizes.items())
        raise ValueError(
            f"{given}: these must grow in this order, or the tails would lie inside the training distribution."
        )


def scale_samples(samples: int, share: float) -> int:
    """Number of samples in a fraction of the evaluation, at least one."""
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; it must be above 0 and at most 1.")
    return max(1, round(samples * share))
