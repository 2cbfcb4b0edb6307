"""Tasks that track a state: the model predicts it after every step, and one forward pass scores all steps.

Labels are shifted as a causal language model expects: the label of a step is in the next column, and every sequence
ends with one more token. Shapes:
n sequences, T tokens, S steps.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..runs.results import ACCURACY, EXACT_MATCH
from ..settings import Positive, Settings
from .base import IGNORED, Curve, Evaluation, NumberedExamples, Task, evaluation_generator, scale_samples


@dataclass(frozen=True, kw_only=True)
class StateOptions(Settings):
    """Scoring of sequences."""

    samples: Positive = 1000
    """Sequences scored inside the training distribution."""
    batch_tokens: Positive = 2**18
    """Tokens per evaluation batch."""


class StateTask(Task):
    """The base of these tasks: training sequences of one length, scored by the most likely token."""

    options: StateOptions

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens and labels to train on, both [count, T]."""
        raise NotImplementedError

    def make_block(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Training examples in the form `NumberedExamples` takes."""
        tokens, labels = self.draw(count, generator)
        return {"input_ids": tokens, "labels": labels, "lengths": torch.full((count,), tokens.shape[1])}

    def training_set(self, seed: int) -> Dataset[dict[str, Tensor]]:
        return NumberedExamples(self.make_block, seed)


@torch.no_grad()
def judge(model: Any, tokens: Tensor, labels: Tensor, batch_tokens: int) -> Tensor:
    """Whether each label [n, T] is the most likely token at its position: 1 or 0; NaN without a label."""
    verdicts = []
    for some, expected in zip(
        *(t.split(max(1, batch_tokens // tokens.shape[1])) for t in (tokens, labels)), strict=True
    ):
        predicted = model(input_ids=some.to(model.device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
        right = (predicted == expected[:, 1:]).double()
        verdicts.append(right.masked_fill(expected[:, 1:] == IGNORED, torch.nan))
    return torch.nn.functional.pad(torch.cat(verdicts), (1, 0), value=torch.nan)


@dataclass(frozen=True, kw_only=True)
class StepOptions(StateOptions):
    """Numbers of steps."""

    trained_steps: Positive = 40
    """Steps per training sequence; shorter sequences are prefixes of it."""
    tested_steps: Positive = 160
    """Steps of the longest evaluated sequence."""

    def __post_init__(self) -> None:
        if self.tested_steps <= self.trained_steps:
            raise ValueError(
                f"tested_steps is {self.tested_steps} and trained_steps {self.trained_steps}; evaluation must go "
                f"beyond training."
            )


class StepTask(StateTask):
    """A state after each of S steps: `begin step step ... end`, scored at the trained number of steps and beyond."""

    headline: ClassVar[str] = "accuracy_outside"
    metrics = (ACCURACY, EXACT_MATCH)
    options: StepOptions

    def draw_steps(self, count: int, steps: int, generator: torch.Generator) -> Tensor:
        """Random steps as tokens [count, S]."""
        raise NotImplementedError

    def follow(self, steps: Tensor) -> Tensor:
        """The state after each step, as tokens [n, S]."""
        raise NotImplementedError

    def lengths(self) -> tuple[int, int]:
        return self.options.trained_steps + 2, self.options.tested_steps + 2

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.draw_sequences(count, self.options.trained_steps, generator)

    def draw_sequences(self, count: int, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens and labels of sequences of S steps, [count, S + 2]."""
        assert self.bos_token_id is not None
        drawn = self.draw_steps(count, steps, generator)
        begin, end = torch.full((count, 1), self.bos_token_id), torch.full((count, 1), self.pad_token_id)
        nothing = torch.full((count, 2), IGNORED)
        return torch.cat((begin, drawn, end), dim=1), torch.cat((nothing, self.follow(drawn)), dim=1)

    def evaluate(self, model: Any, seed: int, share: float = 1.0) -> Evaluation:
        options = self.options
        count = scale_samples(options.samples, share)
        metrics, by_step = {}, torch.empty(0)
        for name, steps, first in (
            ("inside", options.trained_steps, 0),
            ("outside", options.tested_steps, options.trained_steps),
        ):
            sequences = self.draw_sequences(count, steps, evaluation_generator(seed, steps))
            right = judge(model, *sequences, options.batch_tokens)[:, 2:]
            metrics[f"accuracy_{name}"] = 100 * float(right[:, first:].mean())
            metrics[f"exact_match_{name}"] = 100 * float(right.amin(1).mean())
            by_step = right.mean(0)
        return Evaluation(
            metrics=metrics,
            curves=[
                Curve(
                    title="accuracy against steps",
                    x_label="steps",
                    x=[float(step) for step in range(1, options.tested_steps + 1)],
                    y_label="accuracy",
                    y=by_step.tolist(),
                )
            ],
        )
