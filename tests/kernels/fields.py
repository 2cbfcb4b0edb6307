"""Inputs of the field update, and its comparison with plain PyTorch by the twice-rule.

The error against float64 may be at most twice that of plain PyTorch in the same dtype, plus a slack for rounding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from equitape.kernels import reference, update_field

NAMES = ("field", "attended", "gate", "carry", "mix_in", "mix_out")
# what rounding of float32 alone explains, relative to the norm
SLACK = {torch.float32: 1e-6, torch.bfloat16: 1e-4, torch.float16: 1e-5}


def make_inputs(
    *,
    batch: int = 2,
    groups: int = 2,
    heads: int = 4,
    tokens: int = 5,
    dim: int = 16,
    gates: int | None = None,
    parts: int = 1,
    carry: bool = True,
    mix: bool = True,
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Random inputs in float64, rounded to bfloat16 so that every dtype starts from the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    gates = gates or 4 * groups

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).bfloat16().double()

    complexity = (2,) if parts == 2 else ()
    # as the model has it: a slice of [B, N, H, 2D]
    attended = draw(batch, tokens, heads, 2 * dim)[..., dim:].transpose(1, 2)
    return {
        "field": draw(batch, groups, tokens, dim),
        "attended": attended if carry else None,
        "gate": draw(batch, tokens, gates) if mix else None,
        "carry": draw(*complexity, groups, heads, scale=heads**-0.5) if carry else None,
        "mix_in": draw(*complexity, gates, groups, scale=groups**-0.5) if mix else None,
        "mix_out": draw(*complexity, groups, gates, scale=gates**-0.5) if mix else None,
    }


def cast(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """A leaf of the same shape and strides on another device and in another dtype."""
    storage = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    moved = storage.to(device, dtype, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return moved.requires_grad_()


def run(
    function: Callable[..., Tensor],
    inputs: dict[str, Tensor | None],
    device: str,
    dtype: torch.dtype,
    normalize: bool = False,
    *,
    grad_output: Tensor,
    frozen: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """The result and the gradients of the inputs, in float64 on CPU; grad_output is the gradient of the result."""
    leaves = {name: None if x is None else cast(x, device, dtype) for name, x in inputs.items()}
    for name in frozen:
        leaves[name].requires_grad_(False)
    result = function(*leaves.values(), normalize)
    assert result.dtype == dtype
    result.backward(grad_output.to(device, dtype))
    assert all(leaves[name].grad is None for name in frozen)
    trained = {name: leaf.grad for name, leaf in leaves.items() if leaf is not None and name not in frozen}
    found = {"result": result} | trained
    return {name: x.detach().cpu().double() for name, x in found.items()}


def check(
    inputs: dict[str, Tensor | None],
    device: str,
    dtype: torch.dtype,
    normalize: bool = False,
    frozen: tuple[str, ...] = (),
) -> None:
    """The twice-rule, for the result and every gradient."""
    batch = max(x.shape[0] for name, x in inputs.items() if x is not None and name in NAMES[:3])
    shape = (batch, *inputs["field"].shape[1:])
    grad_output = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = run(reference.update_field, inputs, "cpu", torch.float64, normalize, grad_output=grad_output, frozen=frozen)
    plain = run(reference.update_field, inputs, device, dtype, normalize, grad_output=grad_output, frozen=frozen)
    fused = run(update_field, inputs, device, dtype, normalize, grad_output=grad_output, frozen=frozen)
    assert fused.keys() == exact.keys()
    for name, truth in exact.items():
        assert fused[name].shape == truth.shape
        assert truth.norm() > 1e-3
        error, plain_error = (fused[name] - truth).norm(), (plain[name] - truth).norm()
        assert error <= 2 * plain_error + SLACK[dtype] * truth.norm(), f"{name}: {error}, plain PyTorch {plain_error}"
