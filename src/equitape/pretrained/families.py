"""Decoder families that can be adapted, and their configurations as EquitapeConfig."""

from collections.abc import Callable
from typing import Any

from ..model import EquitapeConfig

Translate = Callable[[Any], dict[str, Any]]

COMMON_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "tie_word_embeddings", "attention_dropout",
)  # fmt: skip
SCALING_KINDS = {"default": "default", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3"}
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
            f"positions on full heads, pre-RMSNorm and a gated feed-forward layer. Convert the weights to one of "
            f"these, or train a model with `equitape train`."
        )
    given = {name: getattr(source, name) for name in COMMON_FIELDS}
    given["head_dim"] = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    given.update(FAMILIES[kind](source))
    return EquitapeConfig(**given, encoding={"kind": "rope", **read_rope(source)})


def read_rope(source: Any) -> dict[str, Any]:
    """Base and scaling of the rotary frequencies, from `rope_parameters` or its older name, `rope_scaling`."""
    given = dict(getattr(source, "rope_parameters", None) or getattr(source, "rope_scaling", None) or {})
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
    return {"theta": theta, "scaling": scaling}


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


FAMILIES: dict[str, Translate] = {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3}
