"""Fast repeated launches: what depends only on shapes and layouts is computed once for each.

Triton binds and inspects every argument of every launch, which takes the host longer than a small kernel takes the GPU.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

MAX_KEPT = 4096
"""Limit of cached launches, since training may see rows of any length."""


class Launch(NamedTuple):
    """A launch without its tensors."""

    grid: tuple[int, ...]
    numbers: tuple[Any, ...]
    """Runtime arguments after the tensors."""
    constants: dict[str, Any]
    """Compile-time arguments, and Triton's own such as num_warps."""


_kept: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(kernel: Any, tensors: Sequence[Tensor | None], options: Hashable, describe: Callable[[], Launch]) -> None:
    """Run kernel(*tensors, *numbers, **constants). It may depend only on options and the tensors' layouts."""
    key = (id(kernel), options, *map(_layout, tensors))
    known = _kept.get(key)
    if known is not None:
        run, others = known
        run(*tensors, *others)
        return
    grid, numbers, constants = describe()
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
    """Everything that Triton specializes a kernel on, such as addresses that are multiples of 16."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16, tensor.device
