"""What happens beside the steps of a run: log, evaluation, checkpoints, the clock, and the end when a loss is none."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from . import checkpoints
from .log import StepLog
from .memory import peak_mib, reset_peak
from .settings import TrainSettings

Evaluate = Callable[[Any, int], dict[str, float]]
SECONDS_BETWEEN_LINES = 60


@dataclass
class Meter:
    """Time, tokens and memory of a run, also of what it did before an interruption."""

    seconds: float = 0.0
    """In training steps and the reading of their data; evaluation and saving not counted."""
    tokens: int = 0
    steady_seconds: float = 0.0
    """As seconds, without the first steps after each start, which compile and warm up."""
    steady_tokens: int = 0
    peak_mib: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """The speed once started."""
        tokens, seconds = (
            (self.steady_tokens, self.steady_seconds) if self.steady_tokens else (self.tokens, self.seconds)
        )
        return tokens / max(seconds, 1e-9)


class Bookkeeper(TrainerCallback):
    """Watches a run. Trainer asks it after every step; what a kill loses is done again from the checkpoint."""

    def __init__(
        self,
        log: StepLog,
        settings: TrainSettings,
        run_dir: Path,
        meter: Meter,
        evaluate: Evaluate | None,
        console: Console | None,
    ):
        self.log = log
        self.settings = settings
        self.run_dir = run_dir
        self.meter = meter
        self.evaluate = evaluate
        self.processes = PartialState()
        self.console = console if self.processes.is_main_process else None
        shown = self.console is not None and self.console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not shown,
            transient=True,
        )
        self.board: Any = None
        self._rate = 0.0
        self._mark = 0.0
        self._window: float | None = None
        self._told = 0.0

    def share_of_time(self) -> float:
        """How much of a budget in minutes is spent."""
        assert self.settings.minutes is not None
        return min(1.0, self.meter.seconds / (60 * self.settings.minutes))

    def close(self) -> None:
        """Leave the terminal and the files in order."""
        self.bar.stop()
        if self.board is not None:
            self.board.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        reset_peak()
        if self.processes.is_main_process:
            self.board = open_tensorboard(self.run_dir, state.global_step)
        total = None if self.settings.minutes is not None else state.max_steps
        self.bar.add_task("training", total=total, completed=state.global_step, figures="")
        self.bar.start()
        self._mark = time.perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._rate = kwargs["optimizer"].param_groups[0]["lr"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step = state.global_step
        self.log.end_step(step, self._rate)
        # what needs no figures from the device needs not wait for them
        self.bar.update(self.bar.task_ids[0], completed=step)
        if self.settings.minutes is not None and self.share_of_time() >= 1:
            control.should_training_stop = control.should_save = True
        every = self.settings.eval_every
        evaluates = self.evaluate is not None and every is not None and step % every == 0
        reads = step % self.settings.log_every == 0 or control.should_save or control.should_training_stop or evaluates
        lines = self.log.flush() if reads else []
        self._count_time()
        if reads:
            self._measure(lines)
            self._show(step, lines)
        if self.log.bad_step is not None:
            # what was saved before that step is good, what is in memory is not
            control.should_training_stop, control.should_save = True, False
        elif evaluates:
            self._evaluate(kwargs["model"], step)
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.processes.wait_for_everyone()
        if self.processes.is_main_process:
            partial = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            checkpoints.publish(partial, self.run_dir, asdict(self.meter), self.settings.keep)
        self.processes.wait_for_everyone()
        self._mark = time.perf_counter()

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.meter.seconds += now - self._mark
        self._mark = now

    def _measure(self, lines: list[dict[str, Any]]) -> None:
        """Called where the device has just been waited for, so that times are true."""
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
            self.bar.update(self.bar.task_ids[0], figures=figures)
            self._tell(step, figures)
        if self.board is not None:
            for line in lines:
                for name in ("loss", "grad_norm", "learning_rate"):
                    self.board.add_scalar(name, line[name], line["step"])
            self.board.add_scalar("tokens_per_second", self.meter.tokens_per_second, step)

    def _tell(self, step: int, figures: str) -> None:
        """A line now and then where no bar can be shown, as in the log of a batch system."""
        if self.console is None or self.console.is_terminal or self.meter.seconds - self._told < SECONDS_BETWEEN_LINES:
            return
        self._told = self.meter.seconds
        total = "" if self.settings.minutes is not None else f" of {self.bar.tasks[0].total:,.0f}"
        self.console.print(f"Step {step:,}{total}: {figures}", highlight=False)

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
    """A writer into run_dir/tensorboard that forgets what came after a step; None without TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Whatever is drawn inside, training goes on with the random numbers it would have had."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
