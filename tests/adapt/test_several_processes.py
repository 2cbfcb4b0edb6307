"""Several processes fine-tune and extend as one does, replicated (DDP) and sharded (FSDP2)."""

import importlib
import json
import os
import shutil
from functools import partial

import pytest
from finetuning import losses, make_room, run
from safetensors.torch import load_file

from equitape import extend
from equitape.training.fit import check_checkpoint
from processes import run_processes

STEPS = 6
LONG = bool(os.environ.get("EQUITAPE_LONG_TESTS"))


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A base with a byte tokenizer and text, tokenized by the run of one process."""
    folder = make_room(tmp_path_factory.mktemp("processes"))
    run(folder, folder / "alone", "tape+lora", steps=STEPS, save_steps=2, save_total_limit=9)
    return folder


def steps_of(folder):
    return [line["loss"] for line in losses(folder)]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_two_processes_with_shards_fine_tune_as_one(room, tmp_path):
    out = tmp_path / "out"
    run_processes(2, partial(run, room, out, "tape+lora", steps=STEPS), sharded=True)
    assert steps_of(out) == pytest.approx(steps_of(room / "alone"), rel=1e-5)
    written, expected = (load_file(folder / "adapter.safetensors") for folder in (out, room / "alone"))
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (written[name] - tensor).abs().max() < 1e-5, name
    scores = [json.loads((folder / "results.json").read_text())["perplexity"] for folder in (out, room / "alone")]
    for one, other in zip(*scores, strict=True):
        assert one["perplexity_after"] == pytest.approx(other["perplexity_after"], rel=1e-5)


@pytest.mark.skipif(not LONG, reason="the same code trains from scratch in tests/training")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_two_processes_share_rows(room, tmp_path):
    options = {"steps": STEPS, "row_length": 32, "whole_rows": True}
    run(room, tmp_path / "alone", "tape+lora", **options)
    run_processes(2, partial(run, room, tmp_path / "split", "tape+lora", **options), sharded=True, parts=2)
    assert steps_of(tmp_path / "split") == pytest.approx(steps_of(tmp_path / "alone"), rel=1e-5)


def keep_checkpoints(room, out, options):
    """In each process: a run that looks as if it was killed after its last checkpoint."""
    finetuning = importlib.import_module("equitape.adapt.finetune")
    finetuning.remove_checkpoints = lambda out: None
    run(room, out, "tape+lora", **options)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)] if LONG else [(2, 1)])
def test_another_number_of_processes_continues(room, tmp_path, before, after):
    out = tmp_path / "out"
    options = {"steps": STEPS, "save_steps": 2, "save_total_limit": 9}
    run_processes(before, keep_checkpoints, room, out, options)
    shutil.rmtree(out / "checkpoints" / f"checkpoint-{STEPS}")
    (out / "results.json").unlink()
    run_processes(after, partial(run, room, out, "tape+lora", resume=True, **options))
    assert json.loads((out / "results.json").read_text())["status"] == "done"
    assert steps_of(out) == pytest.approx(steps_of(room / "alone"), rel=1e-5)


def test_a_sharded_checkpoint_needs_a_sharded_run(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "optimizer.bin").touch()
    with pytest.raises(ValueError, match="was written with FSDP2 and cannot be continued without it"):
        check_checkpoint(checkpoint)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_checkpoint(checkpoint)
    (checkpoint / "optimizer.bin").rename(checkpoint / "optimizer.pt")
    with pytest.raises(ValueError, match="was written without FSDP2 and cannot be continued with it"):
        check_checkpoint(checkpoint)


def extend_together(room, out):
    """In each process."""
    os.environ["EQUITAPE_CACHE"] = str(room / "cache")
    result = extend(
        room / "base",
        128,
        out=out,
        steps=4,
        batch_size=2,
        data=[str(room / "data")],
        eval_data=[str(room / "test")],
        eval_lengths=[32, 128],
        samples=1,
    )
    assert result.training["status"] == "done"
    assert set(result.reports) == {"original", "extended"}


def test_two_processes_extend(room, tmp_path):
    run_processes(2, extend_together, room, tmp_path / "two")
    assert len(steps_of(tmp_path / "two/training")) == 4
    assert (tmp_path / "two/adapter.safetensors").exists()
    if not LONG:
        return
    run_processes(1, extend_together, room, tmp_path / "one")
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
    assert steps_of(tmp_path / "two/training") == pytest.approx(steps_of(tmp_path / "one/training"), rel=1e-5)
    one, two = (each["reports"]["extended"]["perplexity"]["metrics"] for each in results)
    assert two == pytest.approx(one, rel=1e-4)
