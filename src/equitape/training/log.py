"""log.jsonl: one line per step, byte-identical whether or not a run was interrupted.

Losses stay on the device until `flush`: reading them at every step would stall the device.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runs.files import plain, write_text

LOG = "log.jsonl"


class StepLog:
    """Collects figures of every step and writes them on `flush`. Only the main process has a file."""

    def __init__(self, path: Path | None, reduce: Callable[[Tensor], Tensor], num_processes: int, tokens: int = 0):
        """reduce: sums a tensor over processes. tokens: count before the first step collected here."""
        self.path = path
        self.reduce = reduce
        self.num_processes = num_processes
        self.tokens = tokens
        self.loss: float | None = None
        self.bad_step: int | None = None
        """The first step with a NaN or infinite loss or gradient."""
        self._micro_batches: list[tuple[Tensor, Tensor | int]] = []
        self._steps: list[tuple[int, float, Tensor, Tensor, Tensor | int]] = []
        self._norm: Tensor | None = None

    def add_micro_batch(self, loss: Tensor, tokens: Tensor | int) -> None:
        """Add the loss of a micro-batch, already divided by the number of labels in the full batch."""
        self._micro_batches.append((loss, tokens))

    def add_norm(self, norm: Tensor) -> None:
        """Set the gradient norm before clipping."""
        # a sharded model returns a sharded number
        self._norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def end_step(self, step: int, learning_rate: float) -> None:
        """Close a step after all its micro-batches."""
        assert self._norm is not None
        losses, tokens = zip(*self._micro_batches, strict=True)
        self._steps.append((step, learning_rate, sum(losses[1:], losses[0]), self._norm, sum(tokens[1:], tokens[0])))
        self._micro_batches.clear()

    def flush(self) -> list[dict[str, Any]]:
        """Read the steps from the device; write and return them, up to the first NaN or infinite one."""
        if not self._steps:
            return []
        steps, rates, losses, norms, tokens = zip(*self._steps, strict=True)
        self._steps.clear()
        # processes exchange tensors on the device, and not every device has float64
        device = losses[0].device if self.num_processes > 1 else torch.device("cpu")
        # float64 keeps float32 losses and token counts exact
        table = torch.stack(
            [
                torch.stack(losses).to(device).double() / self.num_processes,
                torch.stack([torch.as_tensor(count, device=device) for count in tokens]).double(),
                torch.stack(norms).to(device).double() / self.num_processes,
            ]
        )
        if self.num_processes > 1:
            table = self.reduce(table)
        lines: list[dict[str, Any]] = []
        for step, rate, loss, count, norm in zip(steps, rates, *table.tolist(), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.bad_step = step
                break
            self.tokens += int(count)
            self.loss = loss
            line = {"step": step, "loss": loss, "grad_norm": norm, "learning_rate": rate, "tokens": self.tokens}
            lines.append(line)
        self._write(lines)
        return lines

    def add_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Write the figures of an evaluation during training; flush earlier steps first."""
        self._write([{"step": step, "evaluation": plain(metrics)}])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self.path is not None and lines:
            with self.path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


def read_log(path: Path) -> list[dict[str, Any]]:
    """All readable lines of a log; skips damaged and truncated lines."""
    lines = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            try:
                content = json.loads(line) if line.endswith("\n") else None
            except ValueError:
                continue
            if isinstance(content, dict) and isinstance(content.get("step"), int):
                lines.append(content)
    return lines


def truncate_log(path: Path, step: int) -> str:
    """Drop everything after a step, and damaged lines. Returns a sentence about missing steps, or an empty string."""
    kept = [line for line in read_log(path) if line["step"] <= step]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    missing = sorted(set(range(1, step + 1)) - {line["step"] for line in kept if "loss" in line})
    if not missing:
        return ""
    return f"{path} is damaged: {len(missing)} of the first {step} steps are missing, from step {missing[0]} on."


def thin(points: list[tuple[int, float]], most: int = 400) -> list[list[float]]:
    """A curve of at most about `most` points, each the mean of the steps up to it."""
    width = max(1, -(-len(points) // most))
    groups = [points[start : start + width] for start in range(0, len(points), width)]
    return [[group[-1][0], sum(value for _, value in group) / len(group)] for group in groups]
