"""Attention implementations for a value wider than the key, which transformers lacks.

Shapes: B batch, N tokens, K keys, H query heads, G key-value heads, D head dimension, E width of the value.
"""

import warnings
from functools import cache
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..encodings.base import ScoreMod
from ..encodings.running import without_autocast

HALF_PRECISION = (torch.bfloat16, torch.float16)
# cuDNN is fastest in half precision and the only fused kernel for a wider value with grouped heads
HALF_PRECISION_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

# from this width on, two calls train faster than one with a wider value, whose backward runs short of registers
SPLIT_HEAD_DIM = 128


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Unfused attention, which also returns its weights [B, H, N, K]. softcap: bound of the scores, by tanh.

    Scores are computed in float32, as fused kernels do: with a decay they grow along the sequence.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    # the heads of a group and their queries are the rows of one product
    by_group = (key.shape[1], query.shape[1] // key.shape[1] * query.shape[2])
    rows = query.reshape(query.shape[0], *by_group, -1).to(wide) * scaling
    with without_autocast(query.device):
        scores = (rows @ key.to(wide).mT).view(*query.shape[:3], -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        mask = attention_mask
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).to(query.dtype)
    if dropout:
        weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    output = weights.reshape(query.shape[0], *by_group, -1) @ value
    return output.view(*query.shape[:3], -1).transpose(1, 2), weights


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float,
    is_causal: bool = True,
) -> Tensor:
    """scaled_dot_product_attention with kernels tried in order of speed: [B, N, H, E]. is_causal: without a mask.

    transformers' wrapper repeats keys and values for every query head if their widths differ. Under torch.compile, the
    kernel is chosen when the graph is traced.
    """
    num_tokens, num_keys = query.shape[2], key.shape[2]
    # plain bools: under torch.compile with dynamic sizes, comparisons are symbolic
    causal = grouped = drops = False
    if is_causal and mask is None and num_tokens > 1:
        causal = True
    if causal and num_keys > num_tokens:
        # the first call with an empty static cache: the rest is not filled yet
        key, value = key[:, :, :num_tokens], value[:, :, :num_tokens]
    half = query.dtype in HALF_PRECISION
    ratio = query.shape[1] // key.shape[1]
    if ratio > 1 and half and not (mask is not None and mask.requires_grad):
        # only cuDNN supports grouped heads, but neither float32 nor a trained bias
        grouped = True
    elif ratio > 1:
        key, value = key.repeat_interleave(ratio, dim=1), value.repeat_interleave(ratio, dim=1)
    if dropout > 0:
        drops = True
    warn_of_slow_kernel(
        query.device,
        query.dtype,
        (index(query.shape[1]), index(key.shape[1])),
        (index(query.shape[-1]), index(value.shape[-1])),
        None if mask is None else mask.dtype,
        mask is None or mask.stride(-1) == 1,
        (query.requires_grad, mask is not None and mask.requires_grad),
        drops,
        causal,
        grouped,
    )

    def attend(columns: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            query, key, columns, mask, dropout, causal, scale=scaling, enable_gqa=grouped
        ).transpose(1, 2)

    if not half:
        return attend(value)
    with sdpa_kernel(HALF_PRECISION_KERNELS, set_priority=True):
        # the value without the state, and the state: a key may be wider than either
        head_dim = value.shape[-1] // 2
        if value.shape[-1] > key.shape[-1] and head_dim >= SPLIT_HEAD_DIM and value.requires_grad and not dropout:
            return torch.cat((attend(value[..., :head_dim]), attend(value[..., head_dim:])), dim=-1)
        return attend(value)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float,
    window: int | None,
) -> Tensor:
    """Causal flash attention over packed sequences of different lengths, in half precision on CUDA: [1, N, H, E].

    ends: int32, where the sequences of queries and keys end, after a 0; longest: their largest lengths. The last tokens
    of a sequence of keys are its queries. The kernel takes values as wide as keys, so wider ones go in parts.
    """
    packed_query, packed_key, packed_value = (aligned(x[0].transpose(0, 1)) for x in (query, key, value))
    parts = [
        torch.ops.aten._flash_attention_forward(
            packed_query, packed_key, part, *ends, *longest, 0.0, True, False,
            scale=scaling, window_size_left=None if window is None else window - 1, window_size_right=0,
        )[0]
        for part in equal_parts(packed_value, packed_key.shape[-1])
    ]  # fmt: skip
    return torch.cat(parts, dim=-1)[None, ..., : value.shape[-1]]


def aligned(x: Tensor) -> Tensor:
    """Columns [..., E], padded with zeros to a multiple of 8, in rows that each begin at a multiple of 8 elements.

    Flash kernels read 16 bytes at a time and do not check that rows begin there: the GPU faults where they do not.
    """
    if x.shape[-1] % 8:
        return nn.functional.pad(x, (0, -x.shape[-1] % 8))
    return x.contiguous() if any(step % 8 for step in (x.storage_offset(), *x.stride()[:-1])) else x


def equal_parts(x: Tensor, width: int) -> tuple[Tensor, ...]:
    """Columns [..., E] in parts of one width, the last padded with zeros."""
    return nn.functional.pad(x, (0, -x.shape[-1] % width)).split(width, dim=-1)


@torch.compiler.assume_constant_result
def warn_of_slow_kernel(*kind: Any) -> None:
    """`warn_once`, which torch.compile calls while tracing instead of tracing it."""
    warn_once(*kind)


@cache
def warn_once(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    widths: tuple[int, int],
    mask_dtype: torch.dtype | None,
    keys_side_by_side: bool,
    trained: tuple[bool, bool],
    drops: bool,
    causal: bool,
    grouped: bool,
) -> None:
    """Warn once per kind of input that no fused kernel supports, so that torch materialises all scores.

    heads: of query and key; widths: of key and value; keys_side_by_side: whether the mask's last stride is 1; trained:
    query and mask. The check uses a small input of that kind, since torch.compile cannot use the actual one.
    """
    num_tokens = 64 if causal or mask_dtype is not None else 1
    query = torch.empty(1, heads[0], num_tokens, widths[0], dtype=dtype, device=device, requires_grad=trained[0])
    key, value = (torch.empty(1, heads[1], 64, width, dtype=dtype, device=device) for width in widths)
    mask = None
    if mask_dtype is not None:
        mask = torch.empty(1, heads[0], num_tokens, 64, dtype=mask_dtype, device=device, requires_grad=trained[1])
        mask = mask if keys_side_by_side else mask.transpose(1, -1).contiguous().transpose(1, -1)
    parameters = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.1 if drops else 0.0, causal, grouped)
    fused = (
        torch.backends.cuda.can_use_cudnn_attention,
        torch.backends.cuda.can_use_flash_attention,
        torch.backends.cuda.can_use_efficient_attention,
    )
    if not any(can_use(parameters) for can_use in fused):
        warnings.warn(
            f"No fused attention kernel supports {dtype}, keys {widths[0]} and values {widths[1]} wide"
            f"{' and this mask' if mask is not None else ''}; torch's fallback is slow and needs quadratic memory.",
            stacklevel=2,
        )


@cache
def compiled_flex_attention() -> Any:
    """FlexAttention is fast only if compiled; one compiled function serves all layers."""
    return torch.compile(flex_attention)


def flexible_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    score_mod: ScoreMod | None,
    scaling: float,
    options: dict[str, Any] | None = None,
) -> Tensor:
    """FlexAttention with an encoding's bias, which transformers' wrapper does not accept; options of its kernel.

    On the CPU, torch has only its forward, and compiling takes longer than it saves.
    """
    ratio = query.shape[1] // key.shape[1]
    # its kernels need a power of two of query heads per key-value head
    if ratio & (ratio - 1):
        key, value = key.repeat_interleave(ratio, dim=1), value.repeat_interleave(ratio, dim=1)
    plain = query.device.type == "cpu" or torch.compiler.is_compiling()
    function = flex_attention if plain else compiled_flex_attention()
    output = function(
        query, key, value,
        score_mod=score_mod, block_mask=mask, scale=scaling, enable_gqa=True, kernel_options=options,
    )  # fmt: skip
    return output.transpose(1, 2)
