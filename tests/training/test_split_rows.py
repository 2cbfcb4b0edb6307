"""Trainer with context parallelism: the losses of one process."""

import os
import shutil
from functools import partial

import pytest
import torch
from tiny import losses, settings, small_model

from cases import VOCAB
from equitape.tasks.base import NumberedExamples
from equitape.training import checkpoints
from equitape.training.fit import fit
from equitape.training.settings import Jumps
from equitape.training.trainer import prepare_split
from processes import run_processes

LENGTH = 16
LONG = bool(os.environ.get("EQUITAPE_LONG_TESTS"))
JUMPS = Jumps(rate=0.1, size=4.0)


def make_block(count, generator):
    """Rows of one length, whose second half repeats the first."""
    tokens = torch.randint(1, VOCAB, (count, LENGTH), generator=generator)
    tokens[:, LENGTH // 2 :] = tokens[:, : LENGTH // 2]
    return {"input_ids": tokens, "labels": tokens.clone(), "lengths": torch.full((count,), LENGTH)}


def train(run_dir, resume=False, **changes):
    # growth counts tokens, also where ids jump
    model = small_model("tape2", attention_dropout=0.0, query_growth=0.5, query_growth_start=4)
    chosen = settings(**{"steps": 20, "batch_size": 4, "jumps": JUMPS, "save_steps": 50, **changes})
    fit(model, NumberedExamples(make_block, 0, 10_000), chosen, run_dir, resume=resume)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone")
    train(run_dir)
    return losses(run_dir)


@pytest.mark.parametrize(("processes", "parts"), [(2, 2), (4, 2), (4, 4)] if LONG else [(2, 2)])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_losses_are_those_of_one_process(alone, tmp_path, processes, parts):
    """With four processes and two parts, two groups of two read different rows."""
    run_processes(processes, partial(train, tmp_path), sharded=True, parts=parts)
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.mark.skipif(not LONG, reason="the same code resumes with whole rows in test_distributed.py")
@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 4)), ((4, 2), (2, 1))], ids=["more", "fewer"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_another_number_of_processes_continues(alone, tmp_path, before, after):
    """before, after: processes, and how many of them share a row."""
    run_processes(before[0], partial(train, tmp_path, save_steps=10), sharded=True, parts=before[1])
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-20")
    assert checkpoints.step_of(checkpoints.newest(tmp_path)) == 10
    again = partial(train, tmp_path, save_steps=10, resume=True)
    run_processes(after[0], again, sharded=True, parts=after[1])
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)


class TwoProcesses:
    """Knows how rows are split over two processes, without them."""

    size = 2

    def check_length(self, length):
        assert length == LENGTH


def test_packed_rows_are_refused():
    rows = torch.ones(2, LENGTH, dtype=torch.long)
    packed = rows.clone()
    packed[1, 5:] = 2
    with pytest.raises(ValueError, match="The rows are packed, and rows that are split over processes cannot be"):
        prepare_split({"input_ids": rows, "segment_ids": packed}, TwoProcesses())
    inputs = {"input_ids": rows, "segment_ids": rows}
    prepare_split(inputs, TwoProcesses())
    assert list(inputs) == ["input_ids"]


def test_a_compiled_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ValueError, match="compiled models cannot split rows"):
        train(tmp_path, compile=True)
