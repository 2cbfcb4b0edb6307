"""The callback of a training run: log, evaluation, checkpoints, timing, and the stop at a NaN or infinite loss."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..runs.environment import peak_mib, reset_peak
from ..runs.progress import Phase
from . import checkpoints
from .log import StepLog
from .settings import TrainSettings

Evaluate = Callable[[Any, int], dict[str, float]]
SECONDS_BETWEEN_CHECKPOINTS = 60
LEAST_RATIO = 20
"""Between checkpoints that are due by the clock, at least this many times as long as the last one took."""


@dataclass
class Meter:
    """Time, tokens and memory of a run, including those before an interruption."""

    seconds: float = 0.0
    """Time of training steps and their data loading, excluding evaluation and saving."""
    tokens: int = 0
    steady_seconds: float = 0.0
    """`seconds` without the first steps after each start, which compile and warm up."""
    steady_tokens: int = 0
    peak_mib: float | None = None

    @classmethod
    def of(cls, progress: dict[str, Any]) -> "Meter":
        """The meter that a checkpoint stored."""
        return cls(**{entry.name: progress[entry.name] for entry in fields(cls) if entry.name in progress})

    @property
    def tokens_per_second(self) -> float:
        """Throughput after the first steps."""
        tokens, seconds = (
            (self.steady_tokens, self.steady_seconds) if self.steady_tokens else (self.tokens, self.seconds)
        )
        return tokens / max(seconds, 1e-9)


class Bookkeeper(TrainerCallback):
    """Called by Trainer after every step. After a kill, steps since the last checkpoint are repeated."""

    def __init__(
        self,
        log: StepLog,
        settings: TrainSettings,
        run_dir: Path,
        meter: Meter,
        evaluate: Evaluate | None,
        phase: Phase,
    ):
        """phase: the progress display of training."""
        self.log = log
        self.settings = settings
        self.run_dir = run_dir
        self.meter = meter
        self.evaluate = evaluate
        self.processes = PartialState()
        self.phase = phase
        self.board: Any = None
        self._rate = 0.0
        self._mark = 0.0
        self._window: float | None = None
        self._saved = 0.0
        self._saving_seconds = 0.0
        self.began = False
        """Whether training began, with everything read from the checkpoint."""

    def share_of_time(self) -> float:
        """The spent fraction of a budget in minutes."""
        assert self.settings.minutes is not None
        return min(1.0, self.meter.seconds / (60 * self.settings.minutes))

    def close(self) -> None:
        """Close the files."""
        if self.board is not None:
            self.board.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.began = True
        reset_peak()
        if self.processes.is_main_process:
            self.board = open_tensorboard(self.run_dir, state.global_step)
        self._mark = self._saved = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._rate = kwargs["optimizer"].param_groups[0]["lr"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step = state.global_step
        self.log.end_step(step, self._rate)
        # without waiting for the device
        self._count_time()
        self.phase.update(step if self.settings.minutes is None else self.meter.seconds)
        if self.settings.minutes is not None and self.share_of_time() >= 1:
            control.should_training_stop = control.should_save = True
        control.should_save = control.should_save or self._is_saving_due()
        every = self.settings.eval_steps
        evaluates = self.evaluate is not None and every is not None and step % every == 0
        reads = (
            step % self.settings.logging_steps == 0 or control.should_save or control.should_training_stop or evaluates
        )
        lines = self.log.flush() if reads else []
        # with the time that the device still needed
        self._count_time()
        if reads:
            self._measure(lines)
            self._show(step, lines)
        if self.log.bad_step is not None:
            # earlier checkpoints are good; the weights in memory are not
            control.should_training_stop, control.should_save = True, False
        elif evaluates:
            self._evaluate(kwargs["model"], step)
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.processes.wait_for_everyone()
        if self.processes.is_main_process:
            partial = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            checkpoints.publish(partial, self.run_dir, asdict(self.meter), self.settings.save_total_limit)
        self.processes.wait_for_everyone()
        now = time.perf_counter()
        self._saving_seconds = now - self._mark
        self._mark = self._saved = now

    def _is_saving_due(self) -> bool:
        """Whether the clock asks for a checkpoint. Clocks of several processes disagree."""
        if self.settings.save_steps is not None or self.processes.num_processes > 1:
            return False
        wait = max(SECONDS_BETWEEN_CHECKPOINTS, LEAST_RATIO * self._saving_seconds)
        return time.perf_counter() - self._saved >= wait

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.meter.seconds += now - self._mark
        self._mark = now

    def _measure(self, lines: list[dict[str, Any]]) -> None:
        """Update the meter. The device must be idle, so that only finished work is timed."""
        meter = self.meter
        if self._window is not None and lines:
            meter.steady_seconds += meter.seconds - self._window
            meter.steady_tokens += self.log.tokens - meter.tokens
        self._window = meter.seconds
        meter.tokens = self.log.tokens
        peak = peak_mib()
        if peak is not None:
            meter.peak_mib = max(meter.peak_mib or 0.0, peak)

    def _show(self, step: int, lines: list[dict[str, Any]]) -> None:
        if lines:
            figures = f"loss {lines[-1]['loss']:.4f}  {self.meter.tokens_per_second:,.0f} tokens/s"
            if self.meter.peak_mib is not None:
                figures += f"  {self.meter.peak_mib:,.0f} MiB"
            self.phase.update(figures=figures if self.settings.minutes is None else f"step {step:,}  {figures}")
        if self.board is not None:
            for line in lines:
                for name in ("loss", "grad_norm", "learning_rate"):
                    self.board.add_scalar(name, line[name], line["step"])
            self.board.add_scalar("tokens_per_second", self.meter.tokens_per_second, step)

    def _evaluate(self, model: Any, step: int) -> None:
        assert self.evaluate is not None
        model.eval()
        with torch.no_grad(), untouched_generators():
            metrics = self.evaluate(model, step)
        model.train()
        self.log.add_evaluation(step, metrics)
        if self.board is not None:
            for name, value in metrics.items():
                self.board.add_scalar(f"evaluation/{name}", value, step)
        self._mark = time.perf_counter()


def open_tensorboard(run_dir: Path, step: int) -> Any:
    """A TensorBoard writer to run_dir/tensorboard that drops data after `step`; None without TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Restore the random states on exit, so that code in the block does not change training."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
