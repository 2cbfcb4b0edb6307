"""EquitapeConfig: a Llama configuration with a choice of positional encoding."""

import json
import warnings
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..encodings import Geometry, PositionalEncoding, Positions, build_encoding, parse_encoding
from ..encodings.columns import ColumnsEncoding
from ..encodings.positions import grown_queries
from ..registry import describe_choices
from ..settings import check_value

CODE_FILE = "equitape_model.py"
CODE = '''"""This model needs the Python package equitape: pip install equitape

After `import equitape`, transformers loads the model as any other. Without that import, transformers asks to trust this
file (trust_remote_code=True), which does nothing but import the package.
"""

try:
    from equitape import EquitapeConfig, EquitapeForCausalLM, EquitapeModel
except ModuleNotFoundError as error:
    if error.name != "equitape":
        raise
    raise ModuleNotFoundError(
        "This model needs the Python package equitape; run: pip install equitape", name="equitape"
    ) from None
'''
AUTO_MAP = {
    "AutoConfig": "equitape_model.EquitapeConfig",
    "AutoModel": "equitape_model.EquitapeModel",
    "AutoModelForCausalLM": "equitape_model.EquitapeForCausalLM",
}
"""Written to config.json, so that transformers finds CODE_FILE if equitape was not imported."""
REMOVED_FIELDS = {"shifted_group_size": "equitape.adapt with the method 'longlora' sets the groups for training"}
"""Fields of version 0.1 that old files may contain."""
MOST, MOST_LAYERS = (1 << 31) - 1, 100_000
"""The largest size of a tensor's dimension, and the most layers; larger numbers end in errors of torch or never end."""


def check_local(encoding: PositionalEncoding, local: PositionalEncoding) -> None:
    """Refuse an encoding of the layers with a window that needs more than the ids made for the main one."""
    counts = local.needs_extent and not encoding.needs_extent
    changes = [name for name in ("embed", "map_ids") if _changes(local, name)]
    if local.adds_bias or local.keeps_sums or counts or changes:
        raise ValueError(
            f"local_encoding {local.kind!r} with these options cannot serve some of the layers: the model prepares "
            f"ids, biases and running sums for its main encoding only. Use 'rope', 'nope', 'tape' or 'tape2' without a "
            f"clock or a gate, and slopes only if the main encoding has slopes."
        )
    if local.cache_refusal is not None and encoding.cache_refusal is None:
        raise ValueError(f"local_encoding {local.kind!r} with these options cannot be cached: {local.cache_refusal}")


def _changes(encoding: PositionalEncoding, hook: str) -> bool:
    """Whether an encoding has this hook, other than to make the columns of a decay, which a layer can do itself."""
    if hook == "map_ids" and isinstance(encoding, ColumnsEncoding):
        return encoding.has_clock
    return getattr(type(encoding), hook) is not getattr(PositionalEncoding, hook)


class EquitapeConfig(PreTrainedConfig):
    """Configuration of an Equitape decoder: Llama's fields and the ones below.

    Attributes:
        encoding: The positional encoding: a name or a dictionary such as `{"kind": "tape", "mixer_size": 16}`. It is
            checked and its defaults are filled in at construction. Default: RoPE.
        attention_bias: Biases of the q, k and v projections.
        attention_output_bias: Bias of the o projection. Default: `attention_bias`.
        qk_norm: RMS norm on every query and key head, as in Qwen3.
        qk_norm_joint: With qk_norm, one norm over all heads together, as in OLMo 2.
        norms: Where a block normalises: "before" attention and feed-forward layer, as in Llama, "after" them, as in
            OLMo 2, or "both", as in Gemma.
        norm_offset: Added to the weight of every norm; 1 in Gemma.
        query_scale: Factor of the scores. Default: one over the root of head_dim.
        query_growth: How queries grow with the number of tokens read, so that attention stays sharp over more keys than
            in training: beyond `query_growth_start` tokens they are multiplied by
            1 + query_growth * ln(tokens / query_growth_start). Llama 4 has 0.1 and 8192, in steps. Layers with a
            sliding window keep theirs. Default: 0, no growth.
        query_growth_start: Tokens from which queries grow. Default: the context.
        attention_softcap: Bound of the scores, by tanh, as in Gemma 2; needs the attention implementation "eager".
        logit_softcap: Bound of the logits, by tanh.
        embedding_scale: Factor of the token embeddings.
        local_encoding: The positional encoding of the layers with a sliding window, as in Gemma 3, which rotates more
            slowly elsewhere: "rope", "nope", "tape" or "tape2" without a clock or a gate. Default: `encoding`.
        unrotated_layers: Layers without positions, as in SmolLM3.
        experts: Layers with a mixture of experts, as {"family": "mixtral", "layers": [0, 1], ...} with the fields of
            that family's configuration in transformers, whose modules they are.
        sliding_window: How many keys back attention sees. Default: all.
        sliding_layers: Layers with a sliding window. Default: all layers, if there is a window.
        trained_length: Tokens per training row; evaluations use it as the context.
            Default: `max_position_embeddings`.
        num_loops: How often the stack of blocks is applied. `num_hidden_layers` counts applications, so a model of 8
            layers with 2 loops has 4 blocks. The embeddings are added again before every further loop.
    """

    model_type = "equitape"
    keys_to_ignore_at_inference = ["past_key_values", "position_states"]
    base_model_tp_plan = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    attention_dropout: float | int = 0.0
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_joint: bool = False
    norms: str = "before"
    norm_offset: float | int = 0.0
    query_scale: float | None = None
    query_growth: float | int = 0.0
    query_growth_start: int | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    unrotated_layers: list[int] | None = None
    experts: dict[str, Any] | None = None
    sliding_window: int | None = None
    sliding_layers: list[int] | None = None
    trained_length: int | None = None
    num_loops: int = 1
    output_position_states: bool = False
    encoding: dict[str, Any] | str | None = None
    local_encoding: dict[str, Any] | str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # written to every file, but not a property of the model
        kwargs.pop("auto_map", None)
        refuse_misspelt(kwargs, self)
        self._check_types()
        for name, instead in REMOVED_FIELDS.items():
            if kwargs.pop(name, None) is not None:
                warnings.warn(f"EquitapeConfig ignores {name!r}: {instead}.", stacklevel=2)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}; change one of them or set head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        self._check_sizes()
        self.encoding = parse_encoding(self.encoding, self.geometry)
        if self.local_encoding is not None:
            self.local_encoding = parse_encoding(self.local_encoding, self.geometry)
            if self.encoding.get("clock") and 0 in self.local_layers:
                raise ValueError("A clock keeps its sum in layer 0, which has local_encoding here; use no clock.")
            check_local(*(build_encoding(each, self.geometry) for each in (self.encoding, self.local_encoding)))
        super().__post_init__(**kwargs)

    def to_json_file(self, json_file_path: str | PathLike[str], use_diff: bool = True) -> None:
        """Write config.json, and a code file that says what to install."""
        content = {**json.loads(self.to_json_string(use_diff=use_diff)), "auto_map": AUTO_MAP}
        path = Path(json_file_path)
        path.with_name(CODE_FILE).write_text(CODE)
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy this package's source into saved models."""

    def _check_types(self) -> None:
        for name, hint in EquitapeConfig.__annotations__.items():
            if name in EquitapeConfig.__dataclass_fields__ and name != "encoding":
                setattr(self, name, check_value(getattr(self, name), hint, name))
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"Unknown hidden_act {self.hidden_act!r}.{describe_choices(self.hidden_act, ACT2FN)}")

    def _check_sizes(self) -> None:
        assert self.num_key_value_heads is not None and self.head_dim is not None
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "num_loops", "max_position_embeddings"):  # fmt: skip
            size, most = getattr(self, name), MOST_LAYERS if name in ("num_hidden_layers", "num_loops") else MOST
            if not 1 <= size <= most:
                bound = "1 or more" if size < 1 else f"at most {most:,}"
                raise ValueError(f"{name} is {size}; it must be {bound}.")
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(f"pad_token_id is {self.pad_token_id}, but the ids are 0 to {self.vocab_size - 1}.")
        if self.trained_length is not None and self.trained_length < 1:
            raise ValueError(f"trained_length is {self.trained_length}; it must be 1 or more.")
        if not 0 <= self.attention_dropout <= 1:
            raise ValueError(f"attention_dropout is {self.attention_dropout}; it must be from 0 to 1.")
        if self.query_growth < 0:
            raise ValueError(f"query_growth is {self.query_growth}; it must be 0 or more.")
        if self.query_growth and self.query_growth_start is None:
            self.query_growth_start = self.context
        if self.query_growth_start is not None and not 1 <= self.query_growth_start <= MOST:
            bound = "1 or more" if self.query_growth_start < 1 else f"at most {MOST:,}"
            raise ValueError(f"query_growth_start is {self.query_growth_start}; it must be {bound}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}; all key-value heads must serve equally many query heads."
            )
        if self.num_hidden_layers % self.num_loops:
            raise ValueError(
                f"num_hidden_layers {self.num_hidden_layers} counts block applications and must be a multiple of "
                f"num_loops {self.num_loops}."
            )
        if self.norms not in ("before", "after", "both"):
            raise ValueError(f"norms is {self.norms!r}; it must be before, after or both.")
        if self.sliding_layers is not None:
            if self.sliding_window is None:
                raise ValueError("sliding_layers needs sliding_window; set how many keys these layers see.")
            outside = [index for index in self.sliding_layers if not 0 <= index < self.num_hidden_layers]
            if outside:
                raise ValueError(f"sliding_layers has {outside}; layers are 0 to {self.num_hidden_layers - 1}.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be 1 or more.")

    @property
    def context(self) -> int:
        """The context: the number of tokens that the model is meant for."""
        return self.trained_length or self.max_position_embeddings

    def extend(self, meant: int, room: int = 0) -> None:
        """Raise the context to `meant` tokens and the maximum row length to `room`; neither shrinks."""
        meant = max(meant, self.context)
        self.max_position_embeddings = max(meant, room, self.max_position_embeddings)
        self.trained_length = meant if meant < self.max_position_embeddings else None

    @property
    def layer_types(self) -> list[str]:
        """The type of every layer, full or sliding attention, in transformers' names."""
        if self.sliding_window is None:
            return ["full_attention"] * self.num_hidden_layers
        sliding = range(self.num_hidden_layers) if self.sliding_layers is None else self.sliding_layers
        return [
            "sliding_attention" if index in sliding else "full_attention" for index in range(self.num_hidden_layers)
        ]

    def softmax_scale(self, block: int, score_scale: float) -> float:
        """Factor on the scores of a block. score_scale: that of its encoding, YaRN's for example, which is part of the
        rotation and so not of blocks without one.
        """
        assert self.head_dim is not None
        scale = self.query_scale or self.head_dim**-0.5
        return scale if block in (self.unrotated_layers or ()) else scale * score_scale

    def grow_queries(self, positions: Positions) -> Positions:
        """Positions with the factors of queries that `query_growth` asks for."""
        if not self.query_growth:
            return positions
        # growth may have been set on a loaded configuration
        return grown_queries(positions, self.query_growth, self.query_growth_start or self.context)

    @property
    def geometry(self) -> Geometry:
        """The model sizes that an encoding depends on."""
        assert self.num_key_value_heads is not None and self.head_dim is not None
        return Geometry(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            num_layers=self.num_hidden_layers // self.num_loops,
            num_loops=self.num_loops,
            max_positions=self.max_position_embeddings,
        )

    @property
    def local_layers(self) -> list[int]:
        """Layers that have the local encoding."""
        types = self.layer_types if self.local_encoding is not None else []
        return [index for index, kind in enumerate(types) if kind == "sliding_attention"]

    @property
    def value_cache_dims(self) -> list[int]:
        """Width of the cached value in each layer: head_dim plus the encoding's extra columns."""
        return self._widths("value_columns")

    @property
    def key_cache_dims(self) -> list[int]:
        """Width of the cached key in each layer: head_dim plus the encoding's extra columns."""
        return self._widths("key_columns")

    def _widths(self, columns: str) -> list[int]:
        assert isinstance(self.encoding, dict) and self.head_dim is not None
        found = list(getattr(build_encoding(self.encoding, self.geometry), columns))
        if isinstance(self.local_encoding, dict):
            local = getattr(build_encoding(self.local_encoding, self.geometry), columns)
            found = [local[index] if index in self.local_layers else each for index, each in enumerate(found)]
        return [self.head_dim + extra for extra in found] * self.num_loops


def refuse_misspelt(kwargs: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise an error for a keyword that looks like a misspelt field; transformers would store it as an attribute."""
    names = [name for name in type(config).__dataclass_fields__ if not name.startswith("_")]
    for key in kwargs:
        if hasattr(config, key):
            continue
        near = get_close_matches(key, names, n=1, cutoff=0.85)
        if near:
            raise ValueError(f"EquitapeConfig has no field {key!r}. Did you mean {near[0]!r}?")
