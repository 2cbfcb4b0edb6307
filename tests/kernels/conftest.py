from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from devices import HAS_TRITON, INTERPRETED


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter looks through its whole language at every call of a device function, which takes a third of
    its time: once in a launch for each module is enough.
    """
    if not (HAS_TRITON and INTERPRETED):
        yield
        return
    from triton.runtime import interpreter

    patched = set()

    def launch(executor, *arguments, **named):
        patched.clear()
        return whole_launch(executor, *arguments, **named)

    def patch(function):
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return whole_patch(function)

    whole_launch, whole_patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(interpreter.GridExecutor, "__call__", launch)
        changes.setattr(interpreter, "_patch_lang", patch)
        # by default it forms each sum and product of integers twice, to see an overflow that it then does not report
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        changes.setattr(interpreter.interpreter_builder, "options", options)
        yield


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, so that an element no kernel wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.zeros(2).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUITAPE_KERNELS", "triton")
