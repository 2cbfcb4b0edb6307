"""Decoder families that can be adapted, and their configurations as EquitapeConfig."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..model import EquitapeConfig

Translate = Callable[[Any], dict[str, Any]]

COMMON_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "tie_word_embeddings", "attention_dropout",
)  # fmt: skip
SCALING_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
SCALING_NUMBERS = (
    "factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "low_freq_factor",
    "high_freq_factor",
)  # fmt: skip


def translate_config(source: Any) -> EquitapeConfig:
    """The configuration of an Equitape decoder that computes the same as the source model."""
    kind = source.model_type
    if kind == EquitapeConfig.model_type:
        return EquitapeConfig.from_dict(source.to_dict())
    if kind not in FAMILIES:
        raise ValueError(
            f"Architecture {kind!r} cannot be adapted. Supported: {', '.join(FAMILIES)}, decoders with rotary "
            f"positions on full heads, RMS norms and a gated feed-forward layer or a mixture of them. Convert the "
            f"weights to one of these, or train a model with `equitape train`."
        )
    given = {name: getattr(source, name) for name in COMMON_FIELDS if hasattr(source, name)}
    given["head_dim"] = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    given.update(FAMILIES[kind](source))
    if "encoding" not in given:
        given["encoding"] = read_rope(source)
    return EquitapeConfig(**given)


def read_rope(source: Any, layers: str | None = None) -> dict[str, Any]:
    """RoPE with base and scaling of the source, from `rope_parameters` or its older name, `rope_scaling`.

    layers: the type of layers, in a model whose types have different ones.
    """
    given = dict(getattr(source, "rope_parameters", None) or getattr(source, "rope_scaling", None) or {})
    given = given if layers is None else dict(given[layers])
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(
            f"The layers of this model have different rotary positions ({', '.join(given)}); only one set for all "
            f"layers is supported."
        )
    share = given.get("partial_rotary_factor", getattr(source, "partial_rotary_factor", None))
    if share not in (None, 1, 1.0):
        raise ValueError(
            f"This model rotates only part of each head (partial_rotary_factor {share}); only full rotation is "
            f"supported."
        )
    theta = float(given.get("rope_theta") or getattr(source, "rope_theta", None) or 10000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in SCALING_KINDS:
        raise ValueError(f"This model scales its rotary positions by {kind!r}; supported: {', '.join(SCALING_KINDS)}.")
    scaling: dict[str, Any] = {"kind": kind}
    if kind != "default":
        scaling.update({name: float(given[name]) for name in SCALING_NUMBERS if given.get(name) is not None})
        # dynamic scaling starts beyond max_position_embeddings
        trained = None if kind == "dynamic" else given.get("original_max_position_embeddings")
        scaling["original_max_positions"] = trained or source.max_position_embeddings
    if kind == "yarn":
        scaling["truncate"] = bool(given.get("truncate", True))
        scaling.setdefault("factor", source.max_position_embeddings / scaling["original_max_positions"])
    return {"kind": "rope", "theta": theta, "scaling": scaling}


def _llama(source: Any) -> dict[str, Any]:
    return {"attention_bias": source.attention_bias, "mlp_bias": source.mlp_bias}


def _mistral(source: Any) -> dict[str, Any]:
    return {"sliding_window": source.sliding_window}


def _qwen2(source: Any) -> dict[str, Any]:
    return {"attention_bias": True, "attention_output_bias": False, **_windows(source)}


def _qwen3(source: Any) -> dict[str, Any]:
    return {"attention_bias": source.attention_bias, "qk_norm": True, **_windows(source)}


def _windows(source: Any) -> dict[str, Any]:
    """Sliding windows in the layers that the source lists."""
    sliding = [index for index, kind in enumerate(source.layer_types) if kind == "sliding_attention"]
    if source.sliding_window is None or not sliding:
        return {}
    return {"sliding_window": source.sliding_window, "sliding_layers": sliding}


def _smollm3(source: Any) -> dict[str, Any]:
    unrotated = [index for index, rotated in enumerate(source.no_rope_layers) if not rotated]
    return {**_llama(source), "unrotated_layers": unrotated or None, **_windows(source)}


def _olmo2(source: Any) -> dict[str, Any]:
    return {"attention_bias": source.attention_bias, "qk_norm": True, "qk_norm_joint": True, "norms": "after"}


def _phi3(source: Any) -> dict[str, Any]:
    if source.resid_pdrop or source.embd_pdrop:
        raise ValueError("This model drops out residuals or embeddings, which is not supported; set resid_pdrop and "
                         "embd_pdrop to 0.")  # fmt: skip
    return {"sliding_window": source.sliding_window}


def _gemma2(source: Any) -> dict[str, Any]:
    if source.use_bidirectional_attention:
        raise ValueError("This model attends in both directions and is not a decoder.")
    return {
        "hidden_act": source.hidden_activation,
        "attention_bias": source.attention_bias,
        "norms": "both",
        "norm_offset": 1.0,
        "query_scale": source.query_pre_attn_scalar**-0.5,
        "attention_softcap": source.attn_logit_softcapping,
        "logit_softcap": source.final_logit_softcapping,
        "embedding_scale": source.hidden_size**0.5,
        **_windows(source),
    }


def _gemma3(source: Any) -> dict[str, Any]:
    rotations = {
        "encoding": read_rope(source, "full_attention"),
        "local_encoding": read_rope(source, "sliding_attention"),
    }
    return {**_gemma2(source), "qk_norm": True, **rotations}


def _mixtral(source: Any) -> dict[str, Any]:
    fields = ("intermediate_size", "num_local_experts", "num_experts_per_tok", "router_jitter_noise")
    return {"sliding_window": source.sliding_window, **_experts(source, fields, range(source.num_hidden_layers))}


def _qwen3_moe(source: Any) -> dict[str, Any]:
    step, dense = source.decoder_sparse_step, source.mlp_only_layers
    layers = [index for index in range(source.num_hidden_layers) if index not in dense and (index + 1) % step == 0]
    fields = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
    experts = _experts(source, fields, layers if source.num_experts > 0 else ())
    attention = {"attention_bias": source.attention_bias, "qk_norm": True, "sliding_window": source.sliding_window}
    return {**attention, **experts}


def _experts(source: Any, fields: tuple[str, ...], layers: Iterable[int]) -> dict[str, Any]:
    """Layers with experts, and the fields of the source's configuration that describe them."""
    own = {name: getattr(source, name) for name in fields}
    return {"experts": {"family": source.model_type, "layers": list(layers), **own}}


FAMILIES: dict[str, Translate] = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "smollm3": _smollm3, "olmo2": _olmo2,
    "phi3": _phi3, "gemma2": _gemma2, "gemma3_text": _gemma3, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe,
}  # fmt: skip


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections that Phi-3 has in one matrix."""


def split_fused(tensors: dict[str, nn.Parameter], config: EquitapeConfig) -> dict[str, Tensor]:
    """The weights under the names of an Equitape decoder; fused projections (Phi-3) become views of their parts."""
    assert config.head_dim is not None and config.num_key_value_heads is not None
    keys = config.head_dim * config.num_key_value_heads
    rows = {
        "qkv_proj": [config.head_dim * config.num_attention_heads, keys, keys],
        "gate_up_proj": [config.intermediate_size] * 2,
    }
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        owner, module, leaf = split_name(name)
        if module not in FUSED:
            found[name] = tensor
            continue
        for part, piece in zip(FUSED[module], tensor.detach().split(rows[module]), strict=True):
            found[f"{owner}.{part}.{leaf}"] = piece
    return found


def join_fused(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The weights under the names of their family: what `split_fused` has split is one matrix again."""
    found: dict[str, Tensor] = {}
    for name in names:
        owner, module, leaf = split_name(name)
        parts = [f"{owner}.{part}.{leaf}" for part in FUSED.get(module, ())]
        found[name] = torch.cat([tensors[part] for part in parts]) if parts else tensors[name]
    return found


def split_name(name: str) -> tuple[str, str, str]:
    """(owner, module, leaf) of a weight's name."""
    rest, _, leaf = name.rpartition(".")
    owner, _, module = rest.rpartition(".")
    return owner, module, leaf


def write_rope(encoding: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` for transformers from RoPE with base and scaling: the inverse of `read_rope`."""
    scaling = encoding["scaling"]
    kind = scaling["kind"]
    written = {"rope_type": kind, "rope_theta": encoding["theta"]}
    if kind == "default":
        return written
    used = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
            "llama3": ("low_freq_factor", "high_freq_factor")}.get(kind, ())  # fmt: skip
    written |= {name: scaling[name] for name in ("factor", *used) if scaling[name] is not None}
    if kind in ("yarn", "llama3"):
        written["original_max_position_embeddings"] = scaling["original_max_positions"]
    return written
