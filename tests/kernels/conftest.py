from collections.abc import Iterator

import pytest
import torch


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
