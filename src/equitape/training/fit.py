"""One training run on transformers' Trainer. On CPU, an interrupted run gives bit-identical results."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from ..encodings import PositionalEncoding
from ..runs.errors import is_out_of_memory
from ..runs.files import publish_folder, remove_partial
from ..runs.progress import Progress
from ..runs.results import DONE, NAN
from ..tasks.base import IGNORED
from . import checkpoints
from .callbacks import Bookkeeper, Evaluate, Meter
from .jumps import check_jumps, draw_jumps
from .log import LOG, StepLog, truncate_log
from .settings import TrainSettings
from .trainer import ROW_TOKENS, EquitapeTrainer, asked_once, compiled_blocks, learning_rate_share, raise_unreadable

MODEL = "model"
SHARDED_OPTIMIZER = "optimizer.bin"
"""The optimizer in checkpoints of FSDP2; others have optimizer.pt."""
ENDLESS_STEPS = 10**9
MEASURED_EXAMPLES = 256


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of a run. Its directory has the weights in `model/` and the losses in log.jsonl."""

    status: str
    """"done", or "nan" if a loss or gradient was NaN or infinite."""
    note: str
    """What happened, if status is not "done"."""
    steps: int
    tokens: int
    """Tokens seen, without padding."""
    seconds: float
    """Time of training steps."""
    tokens_per_second: float
    peak_mib: float | None
    """Peak memory of the GPU, or of the process without a GPU; None if unknown."""
    loss: float | None
    """Loss of the last step; None if an earlier process did all steps."""


class FirstExamples(Dataset[Any]):
    """The first `count` examples of a data set with their indices, in order, restarting when it ends."""

    def __init__(self, examples: Dataset[Any], count: int):
        self.examples = examples
        self.count = count
        self.size = len(examples)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.examples[index % self.size]


class Collate:
    """Makes batches for a causal model, without the first label and without a mask for right padding.

    Nothing predicts the first token, and no token sees the padding after it. Attention is much faster without a mask.
    The number of real tokens is kept for the log.
    """

    def __init__(
        self,
        stack: Callable[[list[Any]], dict[str, Tensor]],
        unmasked_length: int = 0,
        jumps: Callable[[Sequence[int], Tensor], Tensor] | None = None,
    ):
        """unmasked_length: longest rows that need no mask. jumps: draws those of examples, by indices and tokens."""
        self.stack = stack
        self.unmasked_length = unmasked_length
        self.jumps = jumps

    def __call__(self, numbered: list[tuple[int, Any]]) -> dict[str, Tensor]:
        numbers, examples = zip(*numbered, strict=True)
        batch = dict(self.stack(list(examples)))
        if self.jumps is not None:
            batch["position_jumps"] = self.jumps(numbers, batch["input_ids"])
        batch["labels"] = batch["labels"].clone()
        batch["labels"][:, 0] = IGNORED
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            seen = mask.bool()
            batch[ROW_TOKENS] = seen.sum(1)
            behind = bool((seen[:, :-1] | ~seen[:, 1:]).all())
            # ids that restart in the padding would look like a new sequence
            if behind and mask.shape[1] <= self.unmasked_length and "position_ids" not in batch:
                del batch["attention_mask"]
        return batch


def unmasked_length(model: Any) -> int:
    """The longest rows that need no mask over right padding; 0 if all rows need one.

    An encoding that depends on row length would count the padding, and a position table has a fixed size.
    """
    encodings = [module for module in model.modules() if isinstance(module, PositionalEncoding)]
    if not encodings or not all(encoding.causal for encoding in encodings):
        return 0
    return int(model.config.max_position_embeddings)


def fit(
    model: Any,
    train_dataset: Dataset[Any],
    settings: TrainSettings,
    run_dir: Path | str,
    *,
    collate: Callable[[list[Any]], dict[str, Tensor]] | None = None,
    evaluate: Evaluate | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    row_length: int = 0,
) -> FitResult:
    """Train a model on indexed examples, in order. Leaves the model in evaluation mode.

    train_dataset: maps an index to `input_ids` and `labels` [T], and any other inputs of the model.
    collate: makes a batch of examples. Default: stack them.
    evaluate: called with the model and the step every `eval_steps` steps; its numbers go to the log.
    resume: continue from the newest complete checkpoint in `run_dir`, or start if there is none.
    progress: shows steps, the step a run continues from, and damaged files.
    row_length: tokens of the longest example, for jumps; needed if `collate` pads to the longest of a batch.

    Under `torchrun` or `accelerate launch`, every process calls this with the same arguments. batch_size counts all
    processes together; batches do not depend on the number of processes.
    """
    run_dir = Path(run_dir)
    check_jumps(settings.jumps, [module for module in model.modules() if isinstance(module, PositionalEncoding)])
    steps = count_steps(settings, train_dataset)
    arguments = training_arguments(settings, run_dir, steps)
    processes = PartialState()
    checkpoint = checkpoints.newest(run_dir) if resume else None
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    progress = progress if progress is not None and processes.is_main_process else Progress()
    if processes.is_main_process:
        for note in prepare_directory(run_dir, resume, checkpoint):
            progress.console.print(note, highlight=False, markup=False, soft_wrap=True)
    processes.wait_for_everyone()

    jumps = None if settings.jumps is None else partial(draw_jumps, settings.jumps, settings.seed, row_length)
    use_cache = getattr(model.config, "use_cache", None)
    trainer = EquitapeTrainer(
        model=model,
        args=arguments,
        train_dataset=FirstExamples(train_dataset, steps * settings.batch_size),
        data_collator=Collate(collate or torch.utils.data.default_collate, unmasked_length(model), jumps),
    )
    # set after accelerate, which also cuts float32 operands of compiled runs to 10 bits
    torch.backends.cuda.matmul.allow_tf32 = False
    trainer.remove_callback(PrinterCallback)
    meter = Meter.of(checkpoints.read_progress(checkpoint)) if checkpoint else Meter()
    log_path = run_dir / LOG if processes.is_main_process else None
    log = StepLog(log_path, trainer.accelerator.reduce, processes.num_processes, meter.tokens)
    autocast = torch.bfloat16 if uses_bf16(settings) and not arguments.bf16 else None
    first = checkpoints.step_of(checkpoint) if checkpoint else 0
    if settings.minutes is None:
        shown = progress.phase("training", steps, done=first, unit="step", main=True)
    else:
        shown = progress.phase("training", 60 * settings.minutes, done=meter.seconds, main=True)
    with shown as phase:
        keeper = Bookkeeper(log, settings, run_dir, meter, evaluate, phase)
        trainer.watch(log, learning_rate_share(settings, steps, keeper.share_of_time), autocast)
        trainer.add_callback(keeper)
        model.train()
        try:
            with without_bars(), asked_once(model), compiled_blocks(model, settings):
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except Exception as error:
            if checkpoint is not None and not keeper.began and not is_out_of_memory(error):
                raise_unreadable(checkpoint, error)
            raise
        finally:
            keeper.close()
            if use_cache is not None:
                model.config.use_cache = use_cache
    model.eval()
    if log.bad_step is None:
        save_model(trainer, run_dir)
    shutil.rmtree(run_dir / checkpoints.SAVING, ignore_errors=True)
    return FitResult(
        status=DONE if log.bad_step is None else NAN,
        note="" if log.bad_step is None else describe_bad_step(log.bad_step, checkpoints.newest(run_dir)),
        steps=trainer.state.global_step,
        tokens=log.tokens,
        seconds=meter.seconds,
        tokens_per_second=meter.tokens_per_second,
        peak_mib=meter.peak_mib,
        loss=log.loss,
    )


def count_steps(settings: TrainSettings, examples: Dataset[Any]) -> int:
    """The budget in steps; for one in minutes, more steps than possible."""
    size = len(examples)  # type: ignore[arg-type]
    if size < 1:
        raise ValueError("The data set is empty; give training data.")
    if settings.steps is not None:
        return settings.steps
    if settings.minutes is not None:
        return ENDLESS_STEPS
    if settings.tokens is None:
        raise ValueError("train has no budget; set one of steps, tokens and minutes.")
    measured = first_lengths(examples)
    return max(1, round(settings.tokens * len(measured) / (sum(measured) * settings.batch_size)))


def first_lengths(examples: Dataset[Any]) -> list[int]:
    """Tokens of the first examples."""
    count = min(len(examples), MEASURED_EXAMPLES)  # type: ignore[arg-type]
    return [len(examples[index]["input_ids"]) for index in range(count)]


def uses_bf16(settings: TrainSettings) -> bool:
    """Whether the forward pass runs in bfloat16."""
    if settings.precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return settings.precision == "bf16"


def uses_compiler(settings: TrainSettings) -> bool:
    """Whether the model is compiled as a whole."""
    if context_parallel_size() > 1 or settings.compile == "blocks":
        return False
    return torch.cuda.is_available() if settings.compile == "auto" else bool(settings.compile)


def context_parallel_size() -> int:
    """Processes that share each row, as `accelerate launch` was asked."""
    asked = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    return int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1")) if asked else 1


def shards_weights() -> bool:
    """Whether `accelerate launch` was asked to shard the model (FSDP2)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"


def check_processes(settings: TrainSettings, count: int) -> None:
    """Raise ValueError for settings that do not divide among the processes."""
    if context_parallel_size() > 1 and settings.compile in (True, "blocks"):
        raise ValueError("train: compiled models cannot split rows over processes; set compile to false.")
    readers = count // context_parallel_size()
    share = settings.gradient_accumulation_steps * readers
    if settings.batch_size % share:
        raise ValueError(
            f"train: batch_size {settings.batch_size} cannot be split over {readers} processes and "
            f"{settings.gradient_accumulation_steps} micro-batches; make it a multiple of {share}."
        )
    if settings.minutes is not None and count > 1:
        raise ValueError("train: a budget in minutes needs a single process; set steps instead.")


def training_arguments(settings: TrainSettings, run_dir: Path, steps: int) -> TrainingArguments:
    """The settings as Trainer's arguments. `Bookkeeper` does logging, evaluation and checkpoints."""
    use_cpu = not torch.accelerator.is_available()
    if use_cpu:
        # accelerate numbers the CPUs of several processes, but torch cannot load a checkpoint to "cpu:0"
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    processes = PartialState(cpu=use_cpu)
    check_processes(settings, processes.num_processes)
    share = settings.gradient_accumulation_steps * processes.num_processes // context_parallel_size()
    cuda = torch.cuda.is_available()
    workers = settings.dataloader_num_workers
    arguments = TrainingArguments(
        output_dir=str(run_dir / checkpoints.SAVING),
        use_cpu=use_cpu,
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size // share,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        average_tokens_across_devices=True,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_epsilon=settings.epsilon,
        max_grad_norm=settings.max_grad_norm,
        # for a sharded model, accelerate must know the precision
        bf16=uses_bf16(settings) and shards_weights(),
        torch_compile=uses_compiler(settings),
        # by default, Trainer cuts float32 operands to 10 bits in compiled runs only
        tf32=False,
        gradient_checkpointing=settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if settings.gradient_checkpointing else None,
        seed=settings.seed,
        train_sampling_strategy="sequential",
        dataloader_num_workers=workers if workers is not None else (4 if cuda else 0),
        dataloader_pin_memory=cuda,
        accelerator_config={"non_blocking": cuda},
        remove_unused_columns=False,
        save_strategy="steps",
        save_steps=settings.save_steps or max(50, steps // 10),
        logging_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        ddp_find_unused_parameters=False,
    )
    # one process, one device: otherwise Trainer would use all devices
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def check_checkpoint(checkpoint: Path) -> None:
    """Raise ValueError for a checkpoint whose optimizer would not be found: sharded runs write another file."""
    sharded = (checkpoint / SHARDED_OPTIMIZER).exists()
    if sharded != shards_weights():
        written, now = ("with FSDP2", "without it") if sharded else ("without FSDP2", "with it")
        raise ValueError(
            f"The checkpoint {checkpoint} was written {written} and cannot be continued {now}; the number of processes "
            f"may differ, the accelerate configuration must agree on FSDP2."
        )


def prepare_directory(run_dir: Path, resume: bool, checkpoint: Path | None) -> list[str]:
    """Remove incomplete files and everything after the checkpoint.

    Returns messages for the user of a resumed run: the step it continues from, and damaged files.
    """
    if not resume and ((run_dir / LOG).exists() or (run_dir / checkpoints.CHECKPOINTS).exists()):
        raise ValueError(f"{run_dir} already holds a run; resume it, or choose another directory.")
    run_dir.mkdir(parents=True, exist_ok=True)
    remove_partial(run_dir)
    shutil.rmtree(run_dir / checkpoints.SAVING, ignore_errors=True)
    step = checkpoints.step_of(checkpoint) if checkpoint else 0
    notes = []
    if damaged := checkpoints.damaged(run_dir):
        names = ", ".join(path.name for path in damaged)
        notes.append(f"Skipped damaged checkpoints in {run_dir}: {names}.")
    if checkpoint is not None:
        notes.append(f"Continuing from step {step:,}.")
    elif (run_dir / LOG).exists():
        notes.append("No complete checkpoint yet; starting from step 0.")
    if hole := truncate_log(run_dir / LOG, step):
        notes.append(hole)
    return notes


def save_model(trainer: EquitapeTrainer, run_dir: Path) -> None:
    """Write the weights to `model/` atomically."""
    processes = PartialState()
    aside = run_dir / checkpoints.SAVING / MODEL
    with without_bars():
        trainer.save_model(str(aside))
    processes.wait_for_everyone()
    if processes.is_main_process:
        shutil.rmtree(run_dir / MODEL, ignore_errors=True)
        publish_folder(aside, run_dir / MODEL)
    processes.wait_for_everyone()


def describe_bad_step(step: int, checkpoint: Path | None) -> str:
    """One sentence about a NaN or infinite loss."""
    kept = "no checkpoint was written yet"
    if checkpoint is not None:
        kept = f"the checkpoint of step {checkpoints.step_of(checkpoint)} is kept"
    return f"The loss or its gradient was NaN or infinite at step {step}; {kept}."


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the bars inside the block."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()
