"""Where the kernels can be tested: under Triton's interpreter on the CPU, and on CUDA."""

import importlib.util
import os
import sys

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_CUDA = torch.cuda.is_available()
if HAS_TRITON and not HAS_CUDA and "triton" not in sys.modules:
    # Triton reads this when it is imported, and not again
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
on_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="Triton was imported without TRITON_INTERPRET=1, so it cannot run on CPU"
)
on_cuda = pytest.mark.skipif(
    INTERPRETED or not HAS_CUDA, reason="there is no CUDA device, or TRITON_INTERPRET=1 is set"
)
DEVICES = [
    pytest.param("cpu", marks=on_interpreter),
    pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda]),
]
