"""TAPE's operations, the field update and the backward of its rotations, in plain PyTorch and fused in Triton; PaTH's
products of reflections, in plain PyTorch.

The environment variable EQUITAPE_KERNELS chooses: "auto" (Triton for tensors on CUDA, plain PyTorch otherwise),
"reference" (plain PyTorch everywhere) or "triton" (Triton or an error; on CPU only under Triton's interpreter).
"""

import importlib.util
import os

import torch
from torch import Tensor

from . import reference
from .operator import fused_mix, fused_rotary, fused_rotary_backward, fused_token_update, fused_update
from .reference import move_field, put_frequencies, take_frequencies
from .reflections import reflected_products

__all__ = [
    "apply_rotary_backward",
    "fused_rotary",
    "fuses_rotary",
    "fuses_token",
    "move_field",
    "put_frequencies",
    "reads_pages",
    "reflected_products",
    "take_frequencies",
    "update_field",
    "update_token",
]

CHOICES = ("auto", "reference", "triton")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# registers and shared memory per token grow with these; complex weights count twice
MAX_GROUPS = 32
MAX_HEADS = 64
MAX_GATES = 128
HEAD_DIMS = (16, 256)
# with complex weights: up to so many, weights are applied in turn instead of a mixing matrix per token
FEW_FREQUENCIES = 16
# one processor reads the full gate weight of a token: beyond this size, a separate product is faster
MAX_TOKEN_WEIGHT = 65536

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def update_field(
    field: Tensor,
    attended: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool = False,
) -> Tensor:
    """Update TAPE's field: z' = z + W_a c, then z'' = z' + W_2 diag(psi) W_1 z', then z'' / rms(z'') if normalize.

    psi = silu(gate) is computed inside, which saves a kernel.
    field: [B or 1, G, N, D]; attended: [B, H, N, D] with carry [G, H], or both None; gate: [B, N, I] with mix_in [I, G]
    and mix_out [G, I], or all None. Returns [B, G, N, D]. Complex weights have a leading axis of two.
    """
    if attended is None or carry is None:
        attended = carry = None
    if gate is None or mix_in is None or mix_out is None:
        gate = mix_in = mix_out = None
    choice = _choice()
    if choice == "reference" or (choice == "auto" and not field.is_cuda):
        return reference.update_field(field, attended, gate, carry, mix_in, mix_out, normalize)
    if attended is None and gate is None:
        # nothing to fuse
        return reference.update_field(field, None, None, None, None, None, normalize)
    num_gates = gate.shape[2] if gate is not None else 0
    obstacle = _obstacle(field, attended, num_gates, gate, carry, mix_in, mix_out)
    if obstacle is not None:
        _refuse_if_demanded(choice, obstacle)
        return reference.update_field(field, attended, gate, carry, mix_in, mix_out, normalize)
    if torch.is_autocast_enabled(field.device.type):
        # as in the plain version under autocast: products in autocast's dtype, the field in its own
        dtype = torch.get_autocast_dtype(field.device.type)
        attended = attended.to(dtype) if attended is not None else None
        gate = gate.to(dtype) if gate is not None else None
    batch = max(tensor.shape[0] for tensor in (field, attended, gate) if tensor is not None)
    # autograd sums the gradient of a field shared by the batch
    field = field.expand(batch, -1, -1, -1)
    few_frequencies = field.shape[3] <= 2 * FEW_FREQUENCIES
    if 3 in {weight.dim() for weight in (carry, mix_in) if weight is not None} and not few_frequencies:
        return _mix_field(field, attended, gate, carry, mix_in, mix_out, normalize)
    return fused_update(field, attended, gate, carry, mix_in, mix_out, normalize)


def _mix_field(
    field: Tensor,
    attended: Tensor | None,
    gate: Tensor | None,
    carry: Tensor | None,
    mix_in: Tensor | None,
    mix_out: Tensor | None,
    normalize: bool,
) -> Tensor:
    """The fused update with complex weights. The mixing matrices of all tokens are one matrix product before it: formed
    inside, they and the gradients of their weights need more registers than a thread has.
    """
    mixing = None
    if gate is not None and mix_in is not None and mix_out is not None:
        mixing = reference.mixing_matrices(torch.nn.functional.silu(gate), mix_in, mix_out)
    return fused_mix(field, attended, mixing, carry, normalize)


def fuses_token(field: Tensor, features: Tensor, gate_weight: Tensor) -> bool:
    """Whether to use `update_token`: one token per sequence and no gradients, as in decoding."""
    choice = _choice()
    if choice == "reference" or (choice == "auto" and not field.is_cuda):
        return False
    if features.shape[1] != 1 or torch.is_grad_enabled() or torch.is_autocast_enabled(field.device.type):
        return False
    # an offloaded weight is elsewhere until its module runs
    fits = gate_weight.device == field.device and gate_weight.numel() <= MAX_TOKEN_WEIGHT
    return fits and gate_weight.dtype == features.dtype == field.dtype


def update_token(
    field: Tensor,
    attended: Tensor | None,
    features: Tensor,
    gate_weight: Tensor,
    carry: Tensor | None,
    mix_in: Tensor,
    mix_out: Tensor,
    normalize: bool = False,
) -> Tensor:
    """`update_field` for single-token sequences, with gates computed from features [B, 1, C] and gate_weight [I, C], in
    one kernel if it supports these tensors. Without gradients.
    """
    if attended is None or carry is None:
        attended = carry = None
    obstacle = _obstacle(field, attended, gate_weight.shape[0], features, gate_weight, carry, mix_in, mix_out)
    if obstacle is not None:
        gate = torch.nn.functional.linear(features, gate_weight)
        return update_field(field, attended, gate, carry, mix_in, mix_out, normalize)
    field = field.expand(features.shape[0], -1, -1, -1)
    return fused_token_update(field, attended, features, gate_weight, carry, mix_in, mix_out, normalize)


def reads_pages(x: Tensor) -> bool:
    """Whether to use `triton_paged.paged_attention` for tensors like this one."""
    choice = _choice()
    if choice == "reference" or not _HAS_TRITON or x.dtype not in DTYPES:
        return False
    return x.is_cuda or (choice == "triton" and _interpreted())


def fuses_rotary(query: Tensor, key: Tensor, field: Tensor, changed: Tensor | None, of_query: Tensor | None) -> bool:
    """Whether to use `fused_rotary`: for columns or changed frequencies, which the compiler gives slow kernels.

    A rotation alone is left to the compiler, which fuses it with its neighbours, and so is that of a single token, with
    its columns: few kernels matter more there than fast ones.
    """
    choice = _choice()
    if torch.compiler.is_compiling() and query.shape[2] == 1:
        return False
    if choice == "reference" or (choice == "auto" and not field.is_cuda) or (changed is None and of_query is None):
        return False
    given = [tensor for tensor in (query, key, of_query, changed, field) if tensor is not None]
    obstacle = _general_obstacle(*given)
    if obstacle is not None:
        _refuse_if_demanded(choice, obstacle)
    return obstacle is None


def apply_rotary_backward(
    grad_query: Tensor,
    grad_key: Tensor,
    query: Tensor,
    key: Tensor,
    field: Tensor,
    replaced: int = 0,
    changed: Tensor | None = None,
    inside: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and field, from the gradients of the rotated queries and keys.

    query, key: after the rotation. Queries [B, H, N, D], keys and field [B, G, N, D]. replaced: number of lowest
    frequencies that columns have replaced since; they get no gradient. changed: [B, G, N, 2 F], numbers in place of
    every (D / 2 F)-th frequency of a field [B or 1, G or 1, N, D]; they get a gradient instead of the field. inside:
    number of key-value heads, from the first on, where frequencies are replaced; None for all.
    """
    inputs = (grad_query, grad_key, query, key, field, replaced, changed, inside)
    choice = _choice()
    if choice == "reference" or (choice == "auto" and not field.is_cuda):
        return reference.apply_rotary_backward(*inputs)
    obstacle = _general_obstacle(query, key, field if changed is None else changed, field)
    if obstacle is None:
        return fused_rotary_backward(*inputs)
    _refuse_if_demanded(choice, obstacle)
    return reference.apply_rotary_backward(*inputs)


def _refuse_if_demanded(choice: str, obstacle: str) -> None:
    if choice == "triton":
        raise ValueError(f"EQUITAPE_KERNELS=triton, but {obstacle}; EQUITAPE_KERNELS=auto uses plain PyTorch instead.")


@torch.compiler.assume_constant_result
def _choice() -> str:
    choice = os.environ.get("EQUITAPE_KERNELS", "auto")
    if choice not in CHOICES:
        raise ValueError(f"EQUITAPE_KERNELS={choice!r} is not one of {', '.join(CHOICES)}.")
    return choice


@torch.compiler.assume_constant_result
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _general_obstacle(*tensors: Tensor) -> str | None:
    """Why our kernels do not support these tensors, the last of them a field, or None."""
    field = tensors[-1]
    if not _HAS_TRITON:
        return "Triton is not installed"
    if not (field.is_cuda or _interpreted()):
        return f"the field is on {field.device.type}, where Triton needs its interpreter (TRITON_INTERPRET=1)"
    if not {tensor.dtype for tensor in tensors}.issubset(DTYPES):
        return "a tensor is not bfloat16, float16 or float32"
    if not HEAD_DIMS[0] <= field.shape[3] <= HEAD_DIMS[1]:
        return f"the head dimension {field.shape[3]} is not from {HEAD_DIMS[0]} to {HEAD_DIMS[1]}"
    return None


def _obstacle(field: Tensor, attended: Tensor | None, num_gates: int, *others: Tensor | None) -> str | None:
    """Why the fused update does not support these tensors, the last three of them weights, or None."""
    given = [tensor for tensor in (attended, *others, field) if tensor is not None]
    general = _general_obstacle(*given)
    if general is not None:
        return general
    if len({tensor.dtype for tensor in given}) > 1 and not torch.is_autocast_enabled(field.device.type):
        return "the tensors differ in dtype outside autocast"
    axes = {weight.dim() for weight in others[-3:] if weight is not None}
    if len(axes) > 1:
        return "some weights are real and some complex"
    parts = 2 if 3 in axes else 1
    counts = (
        (field.shape[1], MAX_GROUPS, "key-value heads"),
        (attended.shape[1] if attended is not None else 0, MAX_HEADS, "query heads"),
        (num_gates, MAX_GATES, "gates"),
    )
    for count, limit, name in counts:
        if parts * count > limit:
            return f"there are {count} {name}, more than {limit // parts}"
    return None
