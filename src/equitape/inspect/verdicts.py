"""Results of checks: errors, verdicts, and rotations of a state that must change nothing."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..encodings import PositionalEncoding, Positions
from ..encodings.tensor_tape import TensorTape
from .capture import AT_START, is_at_start, replaced_hook

PASS, FAIL, NOT_PROMISED, NOT_APPLICABLE = "pass", "fail", "not promised", "does not apply"
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Rounding grows with depth: SmolLM2-135M, 30 layers, has 9e-9 and 5e-4. A broken guarantee shows at 1e-1."""
OFFSETS = (1, 1000, 1_000_000)
NO_PHASORS = "There are no phasors to rotate."


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and its result."""

    name: str
    meaning: str
    verdict: str
    error: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """All checks of one model."""

    encoding: str
    dtype: str
    limit: float
    num_tokens: int
    checks: list[Check]
    notes: list[str]

    @property
    def passed(self) -> bool:
        return all(check.verdict != FAIL for check in self.checks)


class Judge:
    """Errors in units of the outputs' spread, and verdicts."""

    names: ClassVar[tuple[str, ...]]
    """The checks, which are methods."""
    what: ClassVar[str]
    """What the model returns."""
    model: Any
    encoding: PositionalEncoding | None
    limit: float
    num_tokens: int
    cut: str = ""
    """Why fewer tokens were used than asked for."""
    expected: Tensor
    spread: float

    def certify(self) -> Certificate:
        """Run all checks."""
        notes = [self.cut] if self.cut else []
        if self.spread == 0:
            notes.append(f"All {self.what} are equal, so the checks prove nothing.")
        if self.encoding is not None and is_at_start(self.model):
            notes.append(AT_START)
        return Certificate(
            encoding="unknown" if self.encoding is None else self.encoding.kind,
            dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."),
            limit=self.limit,
            num_tokens=self.num_tokens,
            checks=[getattr(self, name)() for name in self.names],
            notes=notes,
        )

    def error(self, found: Tensor, expected: Tensor) -> float:
        """Largest difference in units of the outputs' spread."""
        difference = float((found.double() - expected.double()).abs().max()) / max(self.spread, 1e-30)
        return difference if math.isfinite(difference) else math.inf

    def judge(self, name: str, meaning: str, errors: list[float], promised: bool = True, note: str = "") -> Check:
        """Pass or fail by the largest error; neither for properties that are not guaranteed."""
        error = max(errors)
        if math.isinf(error) and self.encoding is None and self.expected.dtype == torch.float64:
            note = f"{note} Some values are NaN or infinite; try float32 for model classes that do not support float64."
            note = note.strip()
        verdict = (PASS if error <= self.limit else FAIL) if promised else NOT_PROMISED
        return Check(name=name, meaning=meaning, verdict=verdict, error=error, note=note)


def not_applicable(name: str, meaning: str, note: str) -> Check:
    """A check that says nothing about this model. note: why."""
    return Check(name=name, meaning=meaning, verdict=NOT_APPLICABLE, note=note)


def find_turn(encoding: PositionalEncoding) -> Callable[[Tensor], Tensor] | None:
    """A function that rotates a field by one angle per frequency; None if the state has no phasors."""
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    if encoding.has_field:
        # real parts, then imaginary parts
        sizes, axis, shape = (2, -1), -2, (encoding.geometry.head_dim // 2,)
    elif isinstance(encoding, TensorTape) and encoding.options.components % 2 == 0:
        channels, pairs = encoding.options.channels, encoding.options.components // 2
        sizes, axis, shape = (-1, channels, pairs, 2), -1, (encoding.geometry.head_dim // channels, 1, pairs)
    else:
        return None
    angles = 2 * math.pi * torch.rand(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def turn(field: Tensor) -> Tensor:
        cos, sin = angles.cos().to(field), angles.sin().to(field)
        first, second = field.unflatten(-1, sizes).unbind(axis)
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=axis)
        return turned.flatten(-len(sizes))

    return turn


def turned_start(encoding: PositionalEncoding, turn: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Rotate an encoding's initial state inside the context."""
    initial_state = encoding.initial_state

    def rotated(positions: Positions, dtype: torch.dtype) -> Tensor:
        state = initial_state(positions, dtype)
        assert state is not None
        return encoding.state_of(turn(encoding.field(state)))

    return replaced_hook(encoding, "initial_state", rotated)
