"""The fused kernels as operators that torch.compile, checkpointing and export can see through.

Registering it needs no Triton; running it does. Shapes as in reference.py.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("equitape::update_field", mutates_args=())
def fused_update(
    field: Tensor,
    carried: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
) -> Tensor:
    """The update of reference.py by Triton, for a field [B, G, N, D] with its whole batch (an expanded view will do).

    The carried field and the gate have one dtype, in which products are computed; the field and the weights may have
    others. Sums are in float32; the result has the wider dtype of the field's and the products'.
    """
    from .triton_forward import forward

    updated = _empty_result(field, carried, gate)
    with _on_device(field):
        forward(updated, field, carried, gate, carry, mix_in, mix_out, normalize)
    return updated


@fused_update.register_fake
def _(
    field: Tensor,
    carried: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
) -> Tensor:
    return _empty_result(field, carried, gate)


@torch.library.custom_op("equitape::update_field_backward", mutates_args=())
def fused_gradients(
    gradient: Tensor,
    field: Tensor,
    carried: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
    wants_field: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the six tensors; an empty tensor for one not given, and for the field unless wants_field."""
    from .triton_backward import backward

    gradients = _empty_gradients(field if wants_field else None, carried, gate, carry, mix_in, mix_out, like=gradient)
    with _on_device(field):
        backward(gradients, gradient, field, carried, gate, carry, mix_in, mix_out, normalize, wants_field)
    return gradients


@fused_gradients.register_fake
def _(
    gradient: Tensor,
    field: Tensor,
    carried: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
    wants_field: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(field if wants_field else None, carried, gate, carry, mix_in, mix_out, like=gradient)


def _empty_result(field: Tensor, carried: Tensor | None, gate: Tensor | None) -> Tensor:
    source = carried if carried is not None else gate
    assert source is not None
    return field.new_empty(field.shape, dtype=torch.promote_types(field.dtype, source.dtype))


def _empty_gradients(
    field: Tensor | None,
    carried: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    like: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def contiguous(tensor: Tensor | None) -> Tensor:
        return like.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    # the carried field is a slice of what attention put out: its gradient keeps the order of those axes in memory
    carried_gradient = like.new_empty(0) if carried is None else torch.empty_like(carried)
    return (
        contiguous(field),
        carried_gradient,
        contiguous(gate),
        contiguous(carry),
        contiguous(mix_in),
        contiguous(mix_out),
    )


def _on_device(tensor: Tensor) -> Any:
    # Triton launches on the current device, which need not be the tensor's
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.normalize = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    wants = ctx.needs_input_grad
    gradients = fused_gradients(gradient, *ctx.saved_tensors, ctx.normalize, wants[0])
    return *(each if wanted else None for each, wanted in zip(gradients, wants, strict=False)), None


fused_update.register_autograd(_backward, setup_context=_save_inputs)


@torch.library.custom_op("equitape::turn_gradients", mutates_args=())
def fused_turn_gradients(
    query_slope: Tensor, key_slope: Tensor, query: Tensor, key: Tensor, field: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """reference.turn_gradients by Triton, for a field with its whole batch."""
    from .triton_turn import turn_gradients

    gradients = _empty_turn_gradients(query, key, field)
    with _on_device(field):
        turn_gradients(gradients, query_slope, key_slope, query, key, field)
    return gradients


@fused_turn_gradients.register_fake
def _(
    query_slope: Tensor, key_slope: Tensor, query: Tensor, key: Tensor, field: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_turn_gradients(query, key, field)


def _empty_turn_gradients(query: Tensor, key: Tensor, field: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # heads of a token side by side, as the projections want the gradients of their outputs
    def by_token(heads: Tensor) -> Tensor:
        return torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)

    return by_token(query), by_token(key), field.new_empty(field.shape)
