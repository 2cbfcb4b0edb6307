"""Capture a step as a CUDA graph, which launches all its kernels at once."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


class CaptureError(RuntimeError):
    """The step cannot be captured."""


@dataclass(frozen=True)
class CapturedStep:
    """A captured step. The graph stores addresses only, so this object keeps what it reads from being freed."""

    graph: Any
    result: Tensor
    step: Callable[[], Tensor]
    """References to the model, the cache and the constants of compiled code."""

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.result


def capture(step: Callable[[], Tensor], device: torch.device) -> CapturedStep:
    """Capture a step as a CUDA graph. Run the step once before, to load kernels and plans; capturing computes nothing.

    Raises CaptureError if the step cannot be captured.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=_capture_stream(torch.cuda.current_device())), _without_waiting():
                result = step()
        except RuntimeError as error:
            # raise a new error: one kept by name would reference itself, the step and all memory it owns
            if any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__context__)):
                raise torch.OutOfMemoryError(str(error)) from None
            raise CaptureError(str(error).partition("\n")[0]) from None
        finally:
            # a capture that fails to end leaves its stream current
            torch.cuda.set_stream(stream)
    return CapturedStep(graph, result, step)


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    # one stream for all captures: cuBLAS keeps a workspace per stream
    return torch.cuda.Stream(device)


@contextmanager
def _without_waiting() -> Iterator[None]:
    """Raise if an operation would wait for the device. Otherwise the driver would abort the capture, and torch's
    allocator would treat it as still active for the rest of the process.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that this mode does not detect everything yet
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
