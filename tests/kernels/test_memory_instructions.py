"""The fused kernels move whole vectors, compiled for a GPU that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from devices import needs_triton

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory_instructions.py"
NARROW = 16
"""Instructions of a thread that move less than 8 bytes: the rotation's, for columns, one number per token."""


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_few_loads_and_stores_are_narrow(tmp_path):
    # the interpreter that other tests use compiles nothing
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    counted = json.loads(run.stdout)
    assert len(counted) == 8
    for kernel, found in counted.items():
        by_bytes = [(int(name.split()[1]), count) for name, count in found.items()]
        narrow = sum(count for size, count in by_bytes if size < 8)
        assert narrow <= NARROW, f"{kernel}: {found}"
        assert sum(count for size, count in by_bytes if size == 16) > 0
