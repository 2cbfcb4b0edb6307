"""One run: resuming, order of data, budgets, and the stop at a NaN or infinite loss."""

import io
import itertools
import math
import multiprocessing
import pickle
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny import losses, numbered, read_lines, run, run_and_die, settings, small_model

from equitape import EquitapeForCausalLM
from equitape.runs.progress import Progress
from equitape.tasks.base import pad_right
from equitape.training import checkpoints
from equitape.training.fit import Collate, count_steps, fit, training_arguments, unmasked_length, uses_compiler
from equitape.training.log import StepLog, read_log, thin, truncate_log
from equitape.training.settings import TrainSettings
from equitape.training.trainer import ROW_TOKENS, learning_rate_share

EVERYTHING = {"eval_steps": 7, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run(run_dir, **EVERYTHING)
    return run_dir


def same(first: Path, second: Path) -> bool:
    weights = [(run_dir / "model" / "model.safetensors").read_bytes() for run_dir in (first, second)]
    return (first / "log.jsonl").read_bytes() == (second / "log.jsonl").read_bytes() and weights[0] == weights[1]


def test_log_has_every_step(whole):
    lines = read_lines(whole)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 25))
    assert [line["step"] for line in lines if "evaluation" in line] == [7, 14, 21]
    assert lines[0].keys() == {"step", "loss", "grad_norm", "learning_rate", "tokens"}
    assert sum(losses(whole)[-5:]) < sum(losses(whole)[:5])


@pytest.mark.parametrize(
    ("place", "count"),
    [
        ("step", 3),
        ("step", 17),
        ("micro-batch", 26),
        ("writing the log", 6),
        ("saving weights", 6),
        ("checksums", 11),
        ("before renaming", 3),
        ("removing", 1),
    ],
)
def test_killed_and_resumed_is_the_same_run(place, count, whole, tmp_path):
    assert run_and_die(tmp_path, place, count, **EVERYTHING) == -9
    result = run(tmp_path, resume=True, **EVERYTHING)
    assert same(whole, tmp_path)
    assert (result.status, result.steps) == ("done", 24)
    assert result.tokens == read_lines(tmp_path)[-1]["tokens"]
    assert not (tmp_path / checkpoints.SAVING).exists()


def test_killed_from_outside_again_and_again(whole, tmp_path):
    """A real `kill -9`, at whatever moment it comes, three times over."""
    for lines in (4, 11, 20):
        process = multiprocessing.get_context("fork").Process(
            target=run, args=(tmp_path,), kwargs={"resume": True, **EVERYTHING}
        )
        process.start()
        while len(read_log(tmp_path / "log.jsonl")) < lines and process.is_alive():
            time.sleep(0.001)
        process.kill()
        process.join()
    run(tmp_path, resume=True, **EVERYTHING)
    assert same(whole, tmp_path)


MANIFESTS = [
    "null",
    "[]",
    '{"files": {',
    '{"files": {}, "progress": {}}',
    '{"files": [], "progress": {}}',
    "[" * 200_000,
]


@pytest.mark.parametrize("damage", ["cut short", "changed", "a file missing", "no manifest", *MANIFESTS])
def test_damaged_checkpoint_is_ignored(damage, whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    newest = run_dir / "checkpoints" / "checkpoint-24"
    weights = newest / "optimizer.pt"
    if damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif damage == "changed":
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    elif damage == "a file missing":
        weights.unlink()
    elif damage == "no manifest":
        (newest / checkpoints.MANIFEST).unlink()
    else:
        (newest / checkpoints.MANIFEST).write_text(damage)
    half_written = run_dir / checkpoints.SAVING / "checkpoint-23"
    half_written.mkdir(parents=True)
    assert checkpoints.step_of(checkpoints.newest(run_dir)) == 20
    (run_dir / "log.jsonl").open("a").write('{"step": 25, "lo')
    run(run_dir, resume=True, **EVERYTHING)
    assert same(whole, run_dir)
    assert checkpoints.is_complete(newest)


@pytest.mark.parametrize("name", ["rng_state.pth", "optimizer.pt", "trainer_state.json"])
def test_checkpoint_that_has_its_checksums_but_cannot_be_read(name, whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    checkpoint = run_dir / "checkpoints" / "checkpoint-24"
    (checkpoint / name).write_bytes(pickle.dumps(Path(name)))
    progress = checkpoints.read_progress(checkpoint)
    changed = Path(shutil.copytree(checkpoint, run_dir / "saving" / "checkpoint-24"))
    (changed / checkpoints.MANIFEST).unlink()
    checkpoints.publish(changed, run_dir, {**progress, "new": 1}, keep=9)
    with pytest.raises(ValueError, match=r"Cannot read the checkpoint .*checkpoint-24'.*delete it"):
        run(run_dir, resume=True, **{**EVERYTHING, "steps": 30})


def test_a_checkpoint_with_scalars_of_version_0_1_resumes(tmp_path):
    run(tmp_path / "whole", encoding="fire", steps=4, save_steps=2, save_total_limit=9)
    old = Path(shutil.copytree(tmp_path / "whole", tmp_path / "old"))
    checkpoint = old / "checkpoints" / "checkpoint-2"
    shutil.rmtree(old / "checkpoints" / "checkpoint-4")
    progress = checkpoints.read_progress(checkpoint)
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    for state in optimizer["state"].values():
        state.update({name: value.reshape(()) for name, value in state.items() if value.numel() == 1})
    changed = Path(shutil.copytree(checkpoint, old / "saving" / "checkpoint-2"))
    torch.save(optimizer, changed / "optimizer.pt")
    weights = load_file(changed / "model.safetensors")
    scalars = {name: value.reshape(()) for name, value in weights.items() if value.numel() == 1}
    assert scalars
    save_file({**weights, **scalars}, changed / "model.safetensors", metadata={"format": "pt"})
    (changed / checkpoints.MANIFEST).unlink()
    checkpoints.publish(changed, old, progress, keep=9)
    run(old, encoding="fire", steps=4, save_steps=2, save_total_limit=9, resume=True)
    assert same(tmp_path / "whole", old)


def test_resuming_a_finished_run_trains_no_more(whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    model = small_model()
    result = fit(model, numbered(), settings(**EVERYTHING), run_dir, resume=True)
    assert (result.status, result.steps) == ("done", 24)
    saved = EquitapeForCausalLM.from_pretrained(whole / "model")
    for name, value in saved.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert same(whole, run_dir)


def test_directory_with_a_run_is_refused(whole):
    with pytest.raises(ValueError, match="already holds a run; resume it"):
        run(whole)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    run(tmp_path, save_total_limit=1, steps=12)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-12"]
    checkpoints.discard(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "model" / "model.safetensors").exists()


class Poisoned(torch.nn.Module):
    """Adds a NaN to the logits from the count-th training batch on."""

    def __init__(self, head: torch.nn.Module, count: int):
        super().__init__()
        self.weight = head.weight
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count -= 1
        return x @ self.weight.T + (float("nan") if self.count < 0 else 0.0)


def test_stops_at_a_nan_or_infinite_loss(tmp_path):
    model = small_model()
    model.lm_head = Poisoned(model.lm_head, 13)
    result = fit(model, numbered(), settings(), tmp_path, collate=partial(pad_right, pad_token_id=0))
    assert result.status == "nan"
    assert result.note == "The loss or its gradient was NaN or infinite at step 14; the checkpoint of step 10 is kept."
    assert checkpoints.step_of(checkpoints.newest(tmp_path)) == 10
    assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, 14))
    assert not (tmp_path / "model").exists()
    # what is kept is good: it goes on
    assert run(tmp_path, resume=True).status == "done"


def test_no_checkpoint_is_saved_after_an_infinite_gradient(tmp_path):
    """The loss of a step may be finite although the weights after it are not."""
    model = small_model()
    step = itertools.count(1)
    model.lm_head.weight.register_hook(lambda gradient: gradient * (float("inf") if next(step) == 5 else 1.0))
    result = fit(model, numbered(), settings(), tmp_path, collate=partial(pad_right, pad_token_id=0))
    assert (result.status, checkpoints.newest(tmp_path)) == ("nan", None)
    assert "at step 5; no checkpoint was written yet" in result.note


def bare_loop(steps: int, batch_size: int) -> list[float]:
    """What `fit` should do, written out."""
    model = small_model(attention_dropout=0.0)
    given = settings(steps=steps)
    matrices = [value for name, value in model.named_parameters() if value.dim() > 1]
    others = [value for name, value in model.named_parameters() if value.dim() == 1]
    groups = [{"params": matrices, "weight_decay": given.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=given.learning_rate, betas=given.betas)
    data, losses = numbered(), []
    for step in range(steps):
        batch = pad_right([data[step * batch_size + row] for row in range(batch_size)], 0)
        share = (step + 0.5) / steps
        warm, fall = (
            share / given.warmup_ratio,
            (1 + math.cos(math.pi * (share - given.warmup_ratio) / (1 - given.warmup_ratio))) / 2,
        )
        for group in optimizer.param_groups:
            group["lr"] = given.learning_rate * (warm if share < given.warmup_ratio else fall)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), given.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_accumulation_steps": 4}, {"dataloader_num_workers": 2}, {"gradient_checkpointing": True}]
)
def test_losses_are_those_of_a_bare_loop(changes, tmp_path):
    """Micro-batches hold different numbers of labels, so that the mean of their means would be another loss."""
    run(tmp_path, dropout=0.0, steps=10, **changes)
    assert losses(tmp_path) == pytest.approx(bare_loop(10, 8), rel=2e-5)


@pytest.mark.parametrize("cuda", [False, True])
def test_compiled_by_itself_on_cuda_alone(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert uses_compiler(TrainSettings(steps=1, compile="auto")) is cuda
    assert uses_compiler(TrainSettings(steps=1, compile=True))
    assert not uses_compiler(TrainSettings(steps=1))
    assert not uses_compiler(TrainSettings(steps=1, compile="blocks"))


def test_compiled_blocks_train_as_plain_ones(tmp_path, monkeypatch):
    """The blocks are compiled while the run trains, and plain again afterwards, when lengths may vary."""
    compiled = []

    def compile_it(function, **options):
        compiled.append(function)
        return torch_compile(function, backend="eager", **options)

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_it)
    run(tmp_path, dropout=0.0, steps=2, compile="blocks")
    assert len(compiled) == 2
    assert all(function.__self__._compiled_call_impl is None for function in compiled)
    assert losses(tmp_path) == pytest.approx(bare_loop(2, 8), rel=2e-5)


def test_a_batch_has_a_mask_only_where_causality_does_not_hide_the_padding():
    def collate(mask, model, **more):
        batch = {"input_ids": torch.zeros(2, 4).long(), "labels": torch.ones(2, 4).long(), "attention_mask": mask}
        return Collate(lambda examples: {**batch, **more}, unmasked_length(model))([(0, None)])

    right, left = (torch.tensor(mask) for mask in ([[1, 1, 1, 1], [1, 1, 0, 0]], [[1, 1, 1, 1], [0, 0, 1, 1]]))
    model = small_model()
    assert "attention_mask" not in collate(right, model)
    assert collate(left, model)["attention_mask"].equal(left)
    assert collate(right, model)[ROW_TOKENS].tolist() == collate(left, model)[ROW_TOKENS].tolist() == [4, 2]
    # restarting ids are packed sequences without it; a prepared mask says more; others ask how long a row is
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 0]])
    assert collate(right, model, position_ids=ids)["attention_mask"].equal(right)
    prepared = torch.ones(2, 1, 4, 4).tril().bool()
    assert collate(prepared, model)["attention_mask"].equal(prepared)
    assert collate(right, small_model("rope-dynamic"))["attention_mask"].equal(right)
    assert collate(right, small_model("learned", max_position_embeddings=3))["attention_mask"].equal(right)
    assert collate(right, torch.nn.Linear(1, 1))["attention_mask"].equal(right)


def test_number_of_workers_changes_nothing(whole, tmp_path):
    run(tmp_path, dataloader_num_workers=2, **EVERYTHING)
    assert same(whole, tmp_path)


def test_bfloat16_differs_but_keeps_float32_weights(tmp_path):
    run(tmp_path / "half", precision="bf16", dropout=0.0, steps=4)
    run(tmp_path / "full", dropout=0.0, steps=4)
    half, full = losses(tmp_path / "half"), losses(tmp_path / "full")
    assert half != full
    assert half == pytest.approx(full, rel=0.02)
    weights = EquitapeForCausalLM.from_pretrained(tmp_path / "half" / "model").state_dict()
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_only_what_is_trainable_changes(tmp_path):
    model = small_model()
    before = {name: value.clone() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("encoding" in name)
    fit(model, numbered(), settings(steps=3), tmp_path, collate=partial(pad_right, pad_token_id=0))
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed
    assert changed == {name for name in before if "encoding" in name}
    assert model.config.use_cache
    assert not model.training


def test_examples_are_seen_in_order_and_again_from_the_start(tmp_path):
    seen = []

    def collate(examples):
        seen.extend(int(example["input_ids"][0]) for example in examples)
        return torch.utils.data.default_collate(examples)

    data = [{"input_ids": torch.full((4,), index), "labels": torch.full((4,), index)} for index in range(10)]
    fit(small_model(), data, settings(steps=3), tmp_path, collate=collate)
    assert seen == [index % 10 for index in range(24)]


def test_budgets(tmp_path):
    data = numbered()
    mean = sum(len(data[index]["input_ids"]) for index in range(256)) / 256
    assert count_steps(TrainSettings(tokens=10_000, batch_size=8), data) == round(10_000 / mean / 8)
    with pytest.raises(ValueError, match="no budget; set one of steps, tokens and minutes"):
        run(tmp_path / "none", steps=None)
    with pytest.raises(ValueError, match="The data set is empty"):
        fit(small_model(), [], settings(), tmp_path / "empty")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules(schedule):
    given = TrainSettings(steps=100, schedule=schedule, warmup_ratio=0.1, final_rate=0.2)
    share = learning_rate_share(given, 100, lambda: 0.0)
    rates = [share(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 0.5) / 10 for step in range(10)])
    assert rates[54] + rates[55] == pytest.approx(2.0 if schedule == "constant" else 1.2, abs=1e-6)
    assert rates[99] == pytest.approx(1.0 if schedule == "constant" else 0.2, abs=0.01)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 5, "tokens": 9}, "steps and tokens are set"),
        ({"steps": 0}, "steps is 0; it must be a whole number from 1 to"),
        ({"compile": "always"}, "compile is 'always'; it must be true or false or one of 'auto', 'blocks'"),
        ({"minutes": 0.0}, "a number above 0"),
        ({"batch_size": 6, "gradient_accumulation_steps": 4}, "not a multiple of gradient_accumulation_steps 4"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"precision": "fp16"}, "precision is 'fp16'; it must be one of 'auto', 'bf16', 'fp32'"),
        ({"warmup_ratio": 2.0}, "it must be a number from 0 to 1"),
        ({"betas": (0.9, 1.0)}, "a list of 2, each a number from 0 to below 1"),
        ({"learning_rate": -1.0}, "must be a number from 0 to 1e"),
        ({"learning_rate": float("nan")}, "must be a finite number from 0 to 1e"),
        ({"dataloader_num_workers": -1}, "must be a whole number of 0 or more"),
        ({"save_steps": 0}, "save_steps is 0"),
        ({"steps": 2**63}, "steps is 9223372036854775808; it must be a whole number from 1 to 1,000"),
        ({"seed": 2**32}, "seed is 4294967296; it must be a whole number from 0 to below 4,294,967,296"),
    ],
)
def test_wrong_settings(wrong, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**wrong)


def test_losses_wait_on_the_device(tmp_path):
    """Nothing is read or written between two readings."""
    log = StepLog(tmp_path / "log.jsonl", lambda table: table, 1)
    for step in (1, 2):
        log.add_micro_batch(torch.tensor(1.0), torch.tensor(5))
        log.add_micro_batch(torch.tensor(0.5), 3)
        log.add_norm(torch.tensor(2.0))
        log.end_step(step, 0.1)
        assert not (tmp_path / "log.jsonl").exists()
    assert [line["tokens"] for line in log.flush()] == [8, 16]
    assert read_log(tmp_path / "log.jsonl")[1]["loss"] == 1.5
    truncate_log(tmp_path / "log.jsonl", 1)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1]


def test_thinned_curve_keeps_the_mean():
    points = [(step, float(step % 7)) for step in range(1, 1001)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert thinned[-1][0] == 1000
    assert sum(value for _, value in thinned) / 100 == pytest.approx(sum(value for _, value in points) / 1000)
    assert thin(points[:5], 100) == [[step, value] for step, value in points[:5]]


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, steps=5, eval_steps=5)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(board.Tags()["scalars"]) == {
        "loss", "grad_norm", "learning_rate", "tokens_per_second", "evaluation/loss"
    }  # fmt: skip
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(losses(tmp_path))


def test_memory_is_counted_on_a_cpu_too(tmp_path):
    result = run(tmp_path, steps=3)
    assert result.peak_mib > 50  # torch alone is more


def test_progress_is_shown_on_a_terminal_only(tmp_path):
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        fit(
            small_model(),
            numbered(),
            settings(steps=3, logging_steps=1),
            tmp_path / str(terminal),
            collate=partial(pad_right, pad_token_id=0),
            progress=Progress(console),
        )
        assert ("tokens/s" in console.file.getvalue()) == terminal


def test_every_setting_of_the_optimizer_reaches_trainer(tmp_path):
    given = {
        "learning_rate": 0.03,
        "weight_decay": 0.2,
        "epsilon": 1e-3,
        "max_grad_norm": 0.7,
        "seed": 5,
        "save_steps": 4,
    }
    arguments = training_arguments(TrainSettings(steps=1, betas=(0.8, 0.95), **given), tmp_path, 9)
    names = {"epsilon": "adam_epsilon"}
    assert {name: getattr(arguments, names.get(name, name)) for name in given} == given
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.max_steps) == (0.8, 0.95, 9)


def test_a_compiled_run_rounds_as_a_plain_one(tmp_path):
    # Trainer's own answer for compiled runs on a GPU is TF32
    assert training_arguments(settings(compile=True), tmp_path, 1).tf32 is False
    # and so is accelerate's, which sets it when it is made
    torch.backends.cuda.matmul.allow_tf32 = True
    model, during = small_model(), []
    model.register_forward_pre_hook(lambda *_: during.append(torch.backends.cuda.matmul.fp32_precision))
    fit(model, numbered(), settings(steps=1), tmp_path, collate=partial(pad_right, pad_token_id=0))
    assert during == ["ieee"]
