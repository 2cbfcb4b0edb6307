"""The fused kernels as operators that torch.compile, checkpointing and export understand.

Registering them does not need Triton; running them does. Shapes as in reference.py, fields with their full batch (they
may be expanded views). The attended field and the gate share one dtype, in which products are computed; the field and
the weights may have others. Sums are in float32; a result has the wider of the field's and the products' dtypes.
Backward operators give empty tensors for inputs that are None, and for the field unless it is wanted.
"""

import contextlib
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda")
"""On the CPU the kernels run under Triton's interpreter."""


def _empty_result(field: Tensor, attended: Tensor | None, gate: Tensor | None, *others: Any) -> Tensor:
    source = attended if attended is not None else gate
    assert source is not None
    dtype = field.dtype if field.dtype == source.dtype else torch.promote_types(field.dtype, source.dtype)
    return torch.empty_like(field, dtype=dtype, memory_format=torch.contiguous_format)


def _empty_gradients(gradient: Tensor, field: Tensor, attended: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    *rest, _normalize, wants_field = others

    def like(tensor: Tensor | None, empty: Callable[[Tensor], Tensor]) -> Tensor:
        # the cheapest way for the host to make a tensor
        return gradient.new_empty(0) if tensor is None else empty(tensor)

    return (
        like(field if wants_field else None, _contiguous),
        # a slice of the attention output, with the heads of a token together
        like(attended, _heads_together),
        *(like(tensor, _contiguous) for tensor in rest),
    )


def _empty_rotated(
    query: Tensor, key: Tensor, field: Tensor, changed: Tensor | None, of_query: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    _of_key, inside = others
    more = 0 if inside is not None or of_query is None else of_query.shape[3]
    return _heads_together(query, more), _heads_together(key, more)


def _empty_rotary_gradients(
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    field: Tensor,
    replaced: int = 0,
    changed: Tensor | None = None,
    inside: int | None = None,
) -> tuple[Tensor, ...]:
    # the layout that the projections need for gradients of their outputs
    return _heads_together(query), _heads_together(key), _contiguous(field if changed is None else changed)


def _contiguous(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _heads_together(tensor: Tensor, more: int = 0) -> Tensor:
    """An empty [B, H, N, D + more] with the heads of a token adjacent in memory."""
    batch, heads, tokens, dim = tensor.shape
    dim = dim + more
    strides = (tokens * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided((batch, heads, tokens, dim), strides, dtype=tensor.dtype, device=tensor.device)


def _on_device(tensor: Tensor) -> Any:
    # Triton launches on the current device; changing to the same one would only take the host's time
    elsewhere = tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if elsewhere else contextlib.nullcontext()


@cache
def _load(kernel: str) -> Callable[..., None]:
    module, _, function = kernel.partition(".")
    return getattr(importlib.import_module(f".{module}", __package__), function)


def _operator(name: str, schema: str, empty_results: Callable[..., Any], kernel: str) -> Any:
    """Register an operator. `empty_results` makes its results from the inputs, also for the compiler, and `kernel`, a
    function of a module here, fills them.

    It is defined by a schema, since calls through torch.library.custom_op take the host several times as long.
    """

    def run(*inputs: Any) -> Any:
        results = empty_results(*inputs)
        with _on_device(inputs[0]):
            _load(kernel)(results, *inputs)
        return results

    torch.library.define(f"equitape::{name}", schema)
    torch.library.impl(f"equitape::{name}", DEVICES, run)
    torch.library.register_fake(f"equitape::{name}", empty_results)
    return getattr(torch.ops.equitape, name).default


_UPDATED = (
    "Tensor field, Tensor? attended, Tensor? gate, Tensor? carry, Tensor? mix_in, Tensor? mix_out, bool normalize"
)
_MIXED = "Tensor field, Tensor? attended, Tensor? mixing, Tensor? carry, bool normalize"

fused_update = _operator(
    "update_field",
    f"({_UPDATED}) -> Tensor",
    _empty_result,
    "triton_forward.forward",
)
fused_gradients = _operator(
    "update_field_backward",
    f"(Tensor gradient, {_UPDATED}, bool wants_field) -> ({', '.join(['Tensor'] * 6)})",
    _empty_gradients,
    "triton_backward.backward",
)
# as update_field, with the mixing matrix of every token, [B, N, 2, G, G], instead of gates and mixing weights
fused_mix = _operator(
    "mix_field",
    f"({_MIXED}) -> Tensor",
    _empty_result,
    "triton_mixing.forward",
)
fused_mix_backward = _operator(
    "mix_field_backward",
    f"(Tensor gradient, {_MIXED}, bool wants_field) -> ({', '.join(['Tensor'] * 4)})",
    _empty_gradients,
    "triton_mixing.backward",
)
# as update_field for single-token sequences, with gates from features [B, 1, C]; without gradients
fused_token_update = _operator(
    "update_token",
    "(Tensor field, Tensor? attended, Tensor features, Tensor gate_weight, Tensor? carry, Tensor mix_in, "
    "Tensor mix_out, bool normalize) -> Tensor",
    _empty_result,
    "triton_forward.forward_token",
)
# without gradients
fused_rotary = _operator(
    "apply_rotary",
    "(Tensor query, Tensor key, Tensor field, Tensor? changed, Tensor? of_query, Tensor? of_key, int? inside) -> "
    "(Tensor, Tensor)",
    _empty_rotated,
    "triton_rotary.apply_rotary",
)
# a field of which numbers have changed may be shared by the batch or by all heads
fused_rotary_backward = _operator(
    "apply_rotary_backward",
    "(Tensor grad_query, Tensor grad_key, Tensor query, Tensor key, Tensor field, int replaced=0, "
    "Tensor? changed=None, int? inside=None) -> (Tensor, Tensor, Tensor)",
    _empty_rotary_gradients,
    "triton_rotary.apply_rotary_backward",
)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.normalize = inputs
    ctx.save_for_backward(*tensors)


def _backward_by(operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wants = ctx.needs_input_grad
        gradients = operator(gradient, *ctx.saved_tensors, ctx.normalize, wants[0])
        return *(each if wanted else None for each, wanted in zip(gradients, wants, strict=False)), None

    return backward


for _name, _gradients in (("update_field", fused_gradients), ("mix_field", fused_mix_backward)):
    torch.library.register_autograd(f"equitape::{_name}", _backward_by(_gradients), setup_context=_save_inputs)
