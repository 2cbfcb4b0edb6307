"""Launching a kernel again: what depends on shapes and layouts alone is worked out once for each of them.

Triton binds and looks at every argument of every launch, which takes the host longer than a small kernel takes the GPU.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

MAX_KEPT = 4096
"""Training on rows of any length would otherwise keep something for every length there is."""


class Plan(NamedTuple):
    """A launch but for its tensors."""

    grid: tuple[int, ...]
    numbers: tuple[Any, ...]
    """Arguments after the tensors that are not known when the kernel is compiled."""
    constants: dict[str, Any]
    """Arguments that are, and Triton's own such as num_warps."""


_kept: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(kernel: Any, tensors: Sequence[Tensor | None], options: Hashable, plan: Callable[[], Plan]) -> None:
    """Run kernel(*tensors, *numbers, **constants). The plan may depend on options and the tensors' layouts alone."""
    key = (id(kernel), options, *map(_layout, tensors))
    known = _kept.get(key)
    if known is not None:
        run, others = known
        run(*tensors, *others)
        return
    grid, numbers, constants = plan()
    compiled = kernel[grid](*tensors, *numbers, **constants)
    if compiled is None:
        # Triton's interpreter compiles nothing
        return
    if len(_kept) >= MAX_KEPT:
        _kept.clear()
    names = kernel.arg_names[len(tensors) + len(numbers) :]
    padded = (*grid, 1, 1)[:3]
    _kept[key] = compiled[padded], (*numbers, *(constants[name] for name in names))


def _layout(tensor: Tensor | None) -> Hashable:
    """All that Triton compiles a kernel for: it assumes addresses that are multiples of 16 where it sees them."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16, tensor.device
