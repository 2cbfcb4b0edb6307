"""What a capture does where there is no GPU to capture on: errors and streams."""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from equitape import cuda_graph
from equitape.cuda_graph import CaptureError, capture


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in for torch.cuda that records its calls."""
    state = SimpleNamespace(stream="main", mode=0, modes=[], end_error=None)

    @contextmanager
    def graph(made, stream):
        before, state.stream = state.stream, stream
        try:
            yield
        finally:
            if state.end_error is not None:
                # torch does not go back to the stream before
                raise state.end_error
            state.stream = before

    def set_mode(mode):
        state.mode = mode
        state.modes.append(mode)

    stand_ins = {
        "device": lambda device: nullcontext(),
        "current_device": lambda: 0,
        "current_stream": lambda: state.stream,
        "set_stream": lambda stream: setattr(state, "stream", stream),
        "Stream": lambda device: "side",
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": graph,
        "get_sync_debug_mode": lambda: state.mode,
        "set_sync_debug_mode": set_mode,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    cuda_graph._capture_stream.cache_clear()
    yield state
    cuda_graph._capture_stream.cache_clear()


DEVICE = torch.device("cuda", 0)


def test_a_step_is_captured_on_its_own_stream_and_may_not_wait(cuda):
    seen = []

    def step():
        seen.append((cuda.stream, cuda.mode))
        return torch.ones(2)

    replayed = capture(step, DEVICE)
    assert seen == [("side", "error")]
    assert (cuda.stream, cuda.mode) == ("main", 0)
    assert replayed() is replayed.result
    # a replay runs no Python
    assert len(seen) == 1


@pytest.mark.parametrize("end_error", [None, RuntimeError("capture was invalidated")], ids=["ends", "does not end"])
def test_what_cannot_be_captured_says_so_and_leaves_nothing_changed(cuda, end_error):
    cuda.end_error = end_error

    def step():
        raise RuntimeError("called a synchronizing CUDA operation\nand a trace")

    with pytest.raises(CaptureError, match=r"^(called a synchronizing CUDA operation|capture was invalidated)$"):
        capture(step, DEVICE)
    assert (cuda.stream, cuda.mode) == ("main", 0)


@pytest.mark.parametrize("end_error", [None, RuntimeError("capture was invalidated")], ids=["ends", "does not end"])
def test_too_little_memory_is_no_matter_of_capturing(cuda, end_error):
    cuda.end_error = end_error

    def step():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        capture(step, DEVICE)
    assert (cuda.stream, cuda.mode) == ("main", 0)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "does not end"])
def test_what_failed_is_freed_with_its_error(cuda, error, ends):
    """A batch is tried again with half of its prompts, which must not find the memory of the whole one taken."""
    cuda.end_error = None if ends else RuntimeError("capture was invalidated")

    class Cache:
        pass

    def fail():
        cache = Cache()
        held.append(weakref.ref(cache))

        def step():
            assert cache
            raise error("failed")

        try:
            capture(step, DEVICE)
        except (torch.OutOfMemoryError, CaptureError):
            return True

    held = []
    gc.disable()
    try:
        assert fail()
        cuda.end_error = None
        assert held[0]() is None
    finally:
        gc.enable()
