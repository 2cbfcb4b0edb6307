"""transformers' Trainer without unnecessary reads from the device."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
from torch import Tensor, nn
from transformers import Trainer

from ..encodings.shards import Shards
from ..model.block import EquitapeDecoderLayer
from ..model.context_parallel import context_parallel
from ..runs.errors import named_line
from .log import StepLog
from .settings import TrainSettings

ROW_TOKENS = "row_tokens"
"""The batch column with the number of real tokens per row; not passed to the model."""
PACKAGE_QUESTION = "is_lomo_available"


def learning_rate_share(
    settings: TrainSettings, steps: int, share_of_time: Callable[[], float]
) -> Callable[[int], float]:
    """The learning rate of a step as a fraction of the peak: warm-up, then the schedule.

    share_of_time: the spent fraction of a budget in minutes.
    """

    def share(step: int) -> float:
        # the middle of the step, so that no step has a learning rate of zero
        done = share_of_time() if settings.minutes is not None else (step + 0.5) / steps
        if done < settings.warmup_ratio:
            return done / settings.warmup_ratio
        if settings.schedule == "constant":
            return 1.0
        left = 1 - min(1.0, (done - settings.warmup_ratio) / max(1 - settings.warmup_ratio, 1e-12))
        fall = left if settings.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2
        return settings.final_rate + (1 - settings.final_rate) * fall

    return share


def raise_unreadable(checkpoint: Path | str | None, error: Exception) -> NoReturn:
    """Raise an error about a checkpoint that has its checksums but cannot be read."""
    raise ValueError(
        f"Cannot read the checkpoint {str(checkpoint)!r} ({named_line(error)}); delete it to continue from an older "
        f"one, or from step 0."
    ) from error


@contextlib.contextmanager
def asked_once(model: nn.Module) -> Iterator[None]:
    """Cache constants that Trainer and accelerate compute at every step.

    Trainer sets training mode, which visits all modules; accelerate looks up a package on disk twice.
    """
    change = model.train

    def train(mode: bool = True) -> nn.Module:
        return model if model.training == mode else change(mode)

    model.train = train  # type: ignore[method-assign]
    modules = [module for module in (accelerate.accelerator, accelerate.optimizer) if hasattr(module, PACKAGE_QUESTION)]
    questions = [getattr(module, PACKAGE_QUESTION) for module in modules]
    for module, question in zip(modules, questions, strict=True):
        setattr(module, PACKAGE_QUESTION, cache(question))
    try:
        yield
    finally:
        del model.train
        for module, question in zip(modules, questions, strict=True):
            setattr(module, PACKAGE_QUESTION, question)


@contextlib.contextmanager
def compiled_blocks(model: nn.Module, settings: TrainSettings) -> Iterator[None]:
    """Compile the blocks of a decoder while training. Equal blocks share their code; evaluation runs without it."""
    blocks = [module for module in model.modules() if isinstance(module, EquitapeDecoderLayer)]
    if settings.compile != "blocks":
        blocks = []
    for block in blocks:
        block.compile()
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


def prepare_split(inputs: dict[str, Any], shards: Shards) -> None:
    """Make inputs that Trainer can split over processes: it splits ids, labels and positions, and nothing else."""
    length = inputs["input_ids"].shape[1]
    shards.check_length(length)
    segments = inputs.pop("segment_ids", None)
    if segments is not None and not bool((segments == segments[:, :1]).all()):
        raise ValueError(
            "The rows are packed, and rows that are split over processes cannot be; train on rows of one document each "
            "(--whole-rows), or without context parallelism."
        )
    jumps = inputs.pop("position_jumps", None)
    if jumps is not None:
        inputs["position_ids"] = torch.arange(length, device=jumps.device) + jumps.cumsum(1)


class EquitapeTrainer(Trainer):
    """Trainer with its own schedule, losses that stay on the device, and autocast that does not copy the logits."""

    step_log: StepLog
    schedule: Callable[[int], float]
    lr_scheduler: Any
    autocast_dtype: torch.dtype | None = None

    def watch(self, log: StepLog, schedule: Callable[[int], float], autocast_dtype: torch.dtype | None) -> None:
        """Set what Trainer's constructor does not take. autocast_dtype None: leave autocast to accelerate."""
        self.step_log = log
        self.schedule = schedule
        self.autocast_dtype = autocast_dtype
        # accelerate's version visits all parameters twice more, for shards and scaled gradients
        clip = self.accelerator.clip_grad_norm_ if self.is_fsdp_enabled else nn.utils.clip_grad_norm_

        def recorded(parameters: Any, max_norm: float) -> Tensor:
            norm = clip(parameters, max_norm)
            log.add_norm(norm)
            return norm

        self.accelerator.clip_grad_norm_ = recorded

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.schedule)
        return self.lr_scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        # version 0.1 had scalar parameters
        for parameter, state in self.optimizer.state.items() if checkpoint is not None else ():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor) and value.dim() == 0 and parameter.dim() == 1:
                    state[name] = value.reshape(1)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        try:
            super()._load_rng_state(checkpoint)
        except Exception as error:
            raise_unreadable(checkpoint, error)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        stack = super().compute_loss_context_manager()
        if self.autocast_dtype is not None:
            # accelerate's autocast also copies the logits to float32, which is unused
            stack.enter_context(torch.autocast(self.args.device.type, self.autocast_dtype))
        return stack

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        rows = inputs.pop(ROW_TOKENS, None)
        tokens = inputs["input_ids"].numel() if rows is None else rows.sum()
        with self._split_rows() as shards:
            if shards is not None:
                # every process of the group reads the same rows
                tokens = tokens // shards.size if shards.rank else tokens - (shards.size - 1) * (tokens // shards.size)
                prepare_split(inputs, shards)
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.step_log.add_micro_batch(loss, tokens)
        return loss

    def _split_rows(self) -> contextlib.AbstractContextManager[Shards | None]:
        """Context parallelism, where the accelerate configuration asks for it."""
        if self.get_cp_size() == 1:
            return contextlib.nullcontext()
        mesh = self.accelerator.torch_device_mesh
        assert mesh is not None
        return context_parallel(self.model, mesh["cp"].get_group())

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        # Trainer's version visits all parameters at every step, for an unused number
        return 0
