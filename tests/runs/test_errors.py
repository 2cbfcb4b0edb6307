"""Errors in one line."""

import errno

import pytest
import torch
from safetensors import SafetensorError

from equitape.runs.errors import describe_system_error, first_line, is_disk_full, is_out_of_memory, named_line


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
    # compilers raise their own errors
    wrapped = RuntimeError("compilation failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is lacks


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 81856 vs 81748"), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EROFS, "Read-only file system"), False),
        (RuntimeError("no"), False),
    ],
)
def test_full_disk(error, full):
    assert is_disk_full(error) is full
    wrapped = ValueError("cannot save")
    wrapped.__context__ = error
    assert is_disk_full(wrapped) is full


def test_errors_of_the_system():
    assert describe_system_error(OSError(errno.EROFS, "Read-only file system", "/x")) == (
        "Cannot read or write '/x' (Read-only file system)."
    )
    assert describe_system_error(OSError(errno.EIO, "Input/output error")) == "Input/output error."
    assert describe_system_error(OSError("Cannot write to 'x'.")) == "Cannot write to 'x'."
