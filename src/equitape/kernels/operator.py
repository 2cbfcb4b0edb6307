"""The fused kernels as operators that torch.compile, checkpointing and export understand.

Registering them does not need Triton; running them does. Shapes as in reference.py. They are defined by schemas, since
calls through torch.library.custom_op take the host several times as long.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEVICES = ("cpu", "cuda")
"""On the CPU the kernels run under Triton's interpreter."""

_INPUTS = "Tensor field, Tensor? attended, Tensor? gate, Tensor? carry, Tensor? mix_in, Tensor? mix_out, bool normalize"
torch.library.define("equitape::update_field", f"({_INPUTS}) -> Tensor")
torch.library.define(
    "equitape::update_field_backward",
    f"(Tensor gradient, {_INPUTS}, bool wants_field) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "equitape::mix_field", "(Tensor field, Tensor? attended, Tensor? mixing, Tensor? carry, bool normalize) -> Tensor"
)
torch.library.define(
    "equitape::mix_field_backward",
    "(Tensor gradient, Tensor field, Tensor? attended, Tensor? mixing, Tensor? carry, bool normalize, "
    "bool wants_field) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "equitape::update_token",
    "(Tensor field, Tensor? attended, Tensor features, Tensor gate_weight, Tensor? carry, Tensor mix_in, "
    "Tensor mix_out, bool normalize) -> Tensor",
)
torch.library.define(
    "equitape::apply_rotary_backward",
    "(Tensor grad_query, Tensor grad_key, Tensor query, Tensor key, Tensor field, int replaced=0, "
    "Tensor? changed=None) -> (Tensor, Tensor, Tensor)",
)
fused_update = torch.ops.equitape.update_field.default
fused_mix = torch.ops.equitape.mix_field.default
fused_mix_backward = torch.ops.equitape.mix_field_backward.default
fused_token_update = torch.ops.equitape.update_token.default
fused_gradients = torch.ops.equitape.update_field_backward.default
fused_rotary_backward = torch.ops.equitape.apply_rotary_backward.default


@torch.library.impl("equitape::update_field", DEVICES)
def _update(
    field: Tensor,
    attended: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
) -> Tensor:
    """The update of reference.py in Triton, for a field [B, G, N, D] with its full batch (may be an expanded view).

    The attended field and the gate share one dtype, in which products are computed; the field and the weights may have
    others. Sums are in float32; the result has the wider of the field's and the products' dtypes.
    """
    from .triton_forward import forward

    updated = _empty_result(field, attended, gate)
    with _on_device(field):
        forward(updated, field, attended, gate, carry, mix_in, mix_out, normalize)
    return updated


@torch.library.impl("equitape::update_field_backward", DEVICES)
def _update_gradients(
    gradient: Tensor,
    field: Tensor,
    attended: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
    wants_field: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the six tensors; empty for tensors not given, and for the field unless wants_field."""
    from .triton_backward import backward

    gradients = _empty_gradients(field if wants_field else None, attended, gate, carry, mix_in, mix_out, like=gradient)
    with _on_device(field):
        backward(gradients, gradient, field, attended, gate, carry, mix_in, mix_out, normalize, wants_field)
    return gradients


@torch.library.impl("equitape::mix_field", DEVICES)
def _mix(
    field: Tensor, attended: Tensor | None, mixing: Tensor | None, carry: Tensor | None, normalize: bool
) -> Tensor:
    """`_update` with the mixing matrix of every token, [B, N, 1 or 2, G, G], instead of gates and mixing weights."""
    from .triton_mixing import forward

    updated = _empty_result(field, attended, mixing)
    with _on_device(field):
        forward(updated, field, attended, mixing, carry, normalize)
    return updated


@torch.library.impl("equitape::mix_field_backward", DEVICES)
def _mix_gradients(
    gradient: Tensor,
    field: Tensor,
    attended: Tensor | None,
    mixing: Tensor | None,
    carry: Tensor | None,
    normalize: bool,
    wants_field: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the four tensors; empty for tensors not given, and for the field unless wants_field."""
    from .triton_mixing import backward

    gradients = _mix_gradient_shapes(gradient, field, attended, mixing, carry, normalize, wants_field)
    with _on_device(field):
        backward(gradients, gradient, field, attended, mixing, carry, normalize, wants_field)
    return gradients


@torch.library.impl("equitape::update_token", DEVICES)
def _update_token(
    field: Tensor,
    attended: Tensor | None,
    features: Tensor,
    gate_weight: Tensor,
    carry: Tensor | None,
    mix_in: Tensor,
    mix_out: Tensor,
    normalize: bool,
) -> Tensor:
    """`_update` for single-token sequences, with gates from features [B, 1, C]; without gradients."""
    from .triton_forward import forward

    updated = _empty_result(field, attended, features)
    with _on_device(field):
        forward(updated, field, attended, features, carry, mix_in, mix_out, normalize, gate_weight)
    return updated


@torch.library.impl("equitape::apply_rotary_backward", DEVICES)
def _rotary_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    field: Tensor,
    replaced: int = 0,
    changed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """reference.apply_rotary_backward in Triton. A field of which numbers have changed may be shared by the batch or
    by all heads; otherwise it has its full size.
    """
    from .triton_rotary import apply_rotary_backward

    gradients = _empty_rotary_gradients(query, key, field if changed is None else changed)
    with _on_device(field):
        apply_rotary_backward(gradients, grad_query, grad_key, query, key, field, replaced, changed)
    return gradients


def _empty_result(field: Tensor, attended: Tensor | None, gate: Tensor | None, *others: Any) -> Tensor:
    source = attended if attended is not None else gate
    assert source is not None
    dtype = field.dtype if field.dtype == source.dtype else torch.promote_types(field.dtype, source.dtype)
    return torch.empty_like(field, dtype=dtype, memory_format=torch.contiguous_format)


def _empty_gradients(
    field: Tensor | None,
    attended: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    like: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def contiguous(tensor: Tensor | None) -> Tensor:
        # the cheapest way for the host to make a tensor
        return like.new_empty(0) if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)

    return (
        contiguous(field),
        # a slice of the attention output, with the heads of a token together
        like.new_empty(0) if attended is None else _heads_together(attended),
        contiguous(gate),
        contiguous(carry),
        contiguous(mix_in),
        contiguous(mix_out),
    )


def _empty_rotary_gradients(query: Tensor, key: Tensor, field: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # the layout that the projections need for gradients of their outputs
    grad_field = torch.empty_like(field, memory_format=torch.contiguous_format)
    return _heads_together(query), _heads_together(key), grad_field


def _heads_together(tensor: Tensor) -> Tensor:
    """An empty [B, H, N, D] with the heads of a token adjacent in memory."""
    _, heads, tokens, dim = tensor.shape
    strides = (tokens * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def _on_device(tensor: Tensor) -> Any:
    # Triton launches on the current device, which may differ from the tensor's
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _gradient_shapes(gradient: Tensor, field: Tensor, *others: Any) -> tuple[Tensor, ...]:
    attended, gate, carry, mix_in, mix_out, _, wants_field = others
    return _empty_gradients(field if wants_field else None, attended, gate, carry, mix_in, mix_out, like=gradient)


def _mix_gradient_shapes(
    gradient: Tensor,
    field: Tensor,
    attended: Tensor | None,
    mixing: Tensor | None,
    carry: Tensor | None,
    normalize: bool,
    wants_field: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = _empty_gradients(field if wants_field else None, attended, mixing, carry, None, None, like=gradient)
    return found[:4]


# what the compiler calls instead of the kernels
_SHAPES: dict[str, Callable[..., Any]] = {
    "update_field": _empty_result,
    "update_token": _empty_result,
    "mix_field": _empty_result,
    "mix_field_backward": _mix_gradient_shapes,
    "update_field_backward": _gradient_shapes,
    "apply_rotary_backward": lambda grad_query, grad_key, query, key, field, replaced=0, changed=None: (
        _empty_rotary_gradients(query, key, field if changed is None else changed)
    ),
}
for _name, _shapes in _SHAPES.items():
    torch.library.register_fake(f"equitape::{_name}", _shapes)


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
