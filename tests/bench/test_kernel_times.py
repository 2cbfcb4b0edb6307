"""Kernels by their time: of every case of a benchmark, and of some steps of a training run, which then stops."""

import runpy
import sys
from pathlib import Path

import pytest

from equitape.bench import run
from equitape.training.trainer import EquitapeTrainer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel_times.py"


def call(monkeypatch, *words):
    # the script replaces these; put them back afterwards
    monkeypatch.setattr(run, "time_run", run.time_run)
    monkeypatch.setattr(EquitapeTrainer, "training_step", EquitapeTrainer.training_step)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--steps", "2", "--kernels", "3", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not end.value.code


def test_benchmark(monkeypatch, capfd):
    case = ["--shape", "tiny", "--batch", 1, "--length", 16, "--workload", "prefill", "--once"]
    call(monkeypatch, "bench", *case, "--encoding", "rope", "--encoding", "tape2 layers=[0]")
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith("==") or " us " in line]
    assert [line.split(":")[0] for line in shown if line.startswith("==")] == [
        "== tiny prefill 1 x 16, rope", "== tiny prefill 1 x 16, tape2 layers=[0]",
    ]  # fmt: skip
    assert len(shown) == 2 * (1 + 3)


def test_training_stops_when_it_was_recorded(monkeypatch, capfd, tmp_path):
    sizes = ["model.hidden_size=16", "model.intermediate_size=16", "model.num_hidden_layers=1", "train.batch_size=2"]
    sizes += ["model.num_attention_heads=2", "task.trained_digits=2", "task.tested_digits=3"]
    call(monkeypatch, "train", "beyond-addition-growth", *sizes, "--encoding", "nope", "--out", tmp_path / "run")
    assert "== training step: " in capfd.readouterr().out
    assert not (tmp_path / "run" / "run.json").exists()
