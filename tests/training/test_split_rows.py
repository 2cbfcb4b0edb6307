"""Trainer with context parallelism: the losses of one process."""

import os
from functools import partial

import pytest
import torch
from tiny import losses, settings, small_model

from cases import VOCAB
from equitape.tasks.base import NumberedExamples
from equitape.training.fit import fit
from equitape.training.settings import Jumps
from equitape.training.trainer import prepare_split
from processes import run_processes

LENGTH = 16
JUMPS = Jumps(rate=0.1, size=4.0)


def make_block(count, generator):
    """Rows of one length, whose second half repeats the first."""
    tokens = torch.randint(1, VOCAB, (count, LENGTH), generator=generator)
    tokens[:, LENGTH // 2 :] = tokens[:, : LENGTH // 2]
    return {"input_ids": tokens, "labels": tokens.clone(), "lengths": torch.full((count,), LENGTH)}


def train(run_dir, **changes):
    model = small_model("tape2", attention_dropout=0.0)
    chosen = settings(**{"steps": 20, "batch_size": 4, "jumps": JUMPS, "save_steps": 50, **changes})
    fit(model, NumberedExamples(make_block, 0, 10_000), chosen, run_dir)


@pytest.mark.parametrize("processes", [2, 4] if os.environ.get("EQUITAPE_LONG_TESTS") else [2])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_losses_are_those_of_one_process(tmp_path, processes):
    """With four, two groups of two read different rows."""
    train(tmp_path / "alone")
    run_processes(processes, partial(train, tmp_path / "split"), sharded=True, parts=2)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


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
