"""What vLLM can serve: one-sentence errors before any weight is read."""

from ..encodings import PositionalEncoding, build_encoding
from ..model import EquitapeConfig
from .sums import LONGEST

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh")
"""Activations of the gated feed-forward layer that vLLM has under transformers' names."""


def check_served(
    config: EquitapeConfig,
    encoding: PositionalEncoding,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    cache_dtype: str = "auto",
    length: int = 0,
) -> None:
    """Raise ValueError for a model or a layout that vLLM cannot serve with the answers of `generate`.

    cache_dtype: as vLLM names it; "auto" if it is the model's own. length: the longest sequence, vLLM's max_model_len.
    """
    kind = encoding.kind
    if encoding.adds_bias:
        raise ValueError(
            f"vLLM cannot serve encoding {kind!r}: its attention takes no bias on the scores; use generate_batch."
        )
    if encoding.cache_refusal is not None:
        raise ValueError(f"vLLM cannot serve encoding {kind!r}: {encoding.cache_refusal}.")
    if encoding.carried_columns != encoding.value_columns:
        raise ValueError(
            f"vLLM cannot serve encoding {kind!r} with carried_frequencies: its projections give values and keys one "
            f"width; use generate_batch."
        )
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"vLLM serves models with hidden_act {', '.join(ACTIVATIONS)}, not {config.hidden_act!r}; "
            f"use generate_batch."
        )
    if config.experts is not None:
        raise ValueError("vLLM cannot serve mixtures of experts of this package yet; use generate_batch.")
    if config.norm_offset not in (0, 1):
        raise ValueError(f"vLLM's norms add 0 or 1 to their weights, not norm_offset {config.norm_offset}.")
    assert config.num_key_value_heads is not None
    for name, heads in (("query", config.num_attention_heads), ("key-value", config.num_key_value_heads)):
        if heads % tensor_parallel and (name == "query" or tensor_parallel % heads):
            raise ValueError(
                f"Tensor parallel size {tensor_parallel} does not divide the model's {heads} {name} heads; use one of "
                f"{', '.join(str(size) for size in range(1, heads + 1) if heads % size == 0)}."
            )
    if pipeline_parallel > 1 and config.num_loops > 1:
        raise ValueError(
            f"A model with num_loops {config.num_loops} runs all blocks several times, so it cannot be split into "
            f"pipeline stages; use tensor parallelism."
        )
    if config.local_encoding is not None and (config.num_loops > 1 or getattr(encoding, "has_clock", False)):
        raise ValueError("vLLM serves no local_encoding together with num_loops above 1 or a clock; use generate.")
    local = config.local_encoding
    others = [build_encoding(local, config.geometry)] if isinstance(local, dict) else []
    for each in (encoding, *others):
        if cache_dtype != "auto" and each.keeps_numbers:
            raise ValueError(
                f"Encoding {each.kind!r} keeps exact numbers in cached keys, which a cache in {cache_dtype!r} would "
                f"round; use kv_cache_dtype 'auto'."
            )
    if length > LONGEST and encoding.keeps_sums:
        raise ValueError(
            f"Encoding {kind!r} keeps running sums, whose places vLLM's cache can tell apart up to {LONGEST:,} tokens, "
            f"not {length:,}; set max_model_len to {LONGEST} or less."
        )
