"""A step captured as a CUDA graph: the host launches it whole, instead of one kernel after another."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


class CaptureError(RuntimeError):
    """A step that cannot be captured."""


@dataclass(frozen=True)
class CapturedStep:
    """A captured step. The graph knows only addresses, so what it reads must be kept from being freed."""

    graph: Any
    result: Tensor
    step: Callable[[], Tensor]
    """Owns the model, the cache and the constants of compiled code."""

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.result


def capture(step: Callable[[], Tensor], device: torch.device) -> CapturedStep:
    """A step as a CUDA graph. It must have run before, so that kernels are loaded and plans made; now it does nothing.

    Raises CaptureError where it cannot be captured.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=_capture_stream(torch.cuda.current_device())), _without_waiting():
                result = step()
        except RuntimeError as error:
            # new errors: one kept here by name would hold itself, and with it the step and the memory of all it owns
            if any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__context__)):
                raise torch.OutOfMemoryError(str(error)) from None
            raise CaptureError(str(error).partition("\n")[0]) from None
        finally:
            # a capture that fails to end leaves its own stream behind
            torch.cuda.set_stream(stream)
    return CapturedStep(graph, result, step)


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    # one for all captures: cuBLAS keeps a workspace for every stream it has seen
    return torch.cuda.Stream(device)


@contextmanager
def _without_waiting() -> Iterator[None]:
    """What would wait for the device raises. Left to the driver, it would break off the capture, after which torch's
    allocator believes for good that one is under way.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # that it does not find everything yet
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
