"""The benchmark on CUDA: what it times was compared with the reference first."""

import io

import pytest
import torch
from rich.console import Console

from equitape.bench import BenchSettings
from equitape.bench.rows import OK
from equitape.bench.run import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_prefills_and_decoding_agree(graphs):
    settings = BenchSettings(
        shape="tiny",
        workloads=("train", "prefill", "decode"),
        encodings=("rope", "tape"),
        lengths=(128,),
        batches=(2,),
        graphs=graphs,
        quick=True,
        once=True,
    )
    rows = list(run(settings, Console(file=io.StringIO())))
    assert [row.status for row in rows] == [OK] * 6
    assert [row.note for row in rows] == ["CUDA graphs" if graphs else ""] * 4 + [""] * 2
    assert all((row.peak_mib is None) == bool(row.note) for row in rows)
