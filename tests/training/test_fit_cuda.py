"""A run on a GPU."""

from functools import partial

import pytest
import torch
from tiny import LENGTH, losses, read_lines, run

from equitape.tasks.base import pad_right
from equitape.training import checkpoints
from equitape.training.run import PadTo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_bfloat16_run_and_resume(tmp_path):
    result = run(tmp_path, dropout=0.0, logging_steps=6)
    assert (result.status, result.steps) == ("done", 24)
    assert result.peak_mib > 0
    first = losses(tmp_path)
    checkpoints.remove(tmp_path / "checkpoints" / "checkpoint-24")
    assert run(tmp_path, dropout=0.0, logging_steps=6, resume=True).steps == 24
    # sums on a GPU may be made in another order
    assert losses(tmp_path) == pytest.approx(first, rel=1e-2)


def test_half_precision_and_full_agree(tmp_path):
    run(tmp_path / "half", dropout=0.0, steps=5)
    run(tmp_path / "full", dropout=0.0, steps=5, precision="fp32")
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "full"), rel=0.02)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_a_compiled_run_has_the_gradients_of_a_plain_one(tmp_path, precision, tolerance):
    """With workers, and only the encoding trained: gradients that are missing or wrong have another norm.

    Heads are wide enough for the fused kernels, and rows of one length, as those of a compiled run are.

    Two steps: noise of 1e-7 in the gradients parts the losses of ten by 1e-3, since Adam makes steps of one size of it.
    """
    chosen = {
        "dropout": 0.0,
        "steps": 2,
        "logging_steps": 1,
        "precision": precision,
        "trainable": lambda name: "encoding" in name,
        "sizes": {"hidden_size": 64},
        "collate": PadTo(partial(pad_right, pad_token_id=0), LENGTH, 0),
    }
    run(tmp_path / "plain", **chosen)
    run(tmp_path / "compiled", compile="auto", dataloader_num_workers=2, **chosen)
    plain, compiled = read_lines(tmp_path / "plain"), read_lines(tmp_path / "compiled")
    assert plain[0]["grad_norm"] > 1e-3
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in compiled] == pytest.approx([line[key] for line in plain], rel=tolerance)


def test_losses_are_read_only_when_asked(tmp_path, monkeypatch):
    """Reading a number from the device waits for it; between two readings `fit` must not."""
    from equitape.training.log import StepLog

    end_step, flush = StepLog.end_step, StepLog.flush
    reads = []
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append("item") or self.tolist())
    monkeypatch.setattr(StepLog, "end_step", lambda self, *args: (reads.append("step"), end_step(self, *args))[1])
    monkeypatch.setattr(StepLog, "flush", lambda self: (reads.append("flush"), flush(self))[1])
    run(tmp_path, dropout=0.0, steps=20, logging_steps=10, save_steps=100)
    between = reads[reads.index("flush") + 1 :]
    between = between[: between.index("flush")]
    assert between == ["step"] * 10
