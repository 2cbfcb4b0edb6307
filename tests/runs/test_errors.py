"""Errors in one line."""

import pytest
import torch

from equitape.runs.errors import first_line, is_out_of_memory, named_line


def test_lines():
    assert first_line(ValueError("one.\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert named_line(ValueError("one\ntwo")) == "ValueError: one"
    assert named_line(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nmore"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of luck"), False),
        (ValueError("no"), False),
    ],
)
def test_out_of_memory(error, lacks):
    assert is_out_of_memory(error) is lacks
    # compilers raise an error of their own
    wrapped = RuntimeError("compilation failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is lacks
