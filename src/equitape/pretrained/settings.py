"""Adaptation methods and their settings; imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from ..settings import Ge, Gt, Le, Lt, Settings

MethodName = Literal[
    "tape", "lora", "tape+lora", "longlora", "theta", "theta+lora", "theta+tape+lora", "tape2+lora", "theta+tape2+lora",
    "drope", "full",
]  # fmt: skip
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear layer that LoRA can update."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """What one method does."""

    idea: str
    tape: Literal["tape", "tape2"] | None = None
    """Replace RoPE by this kind of TAPE and train its update."""
    lora: bool = False
    """Train low-rank updates of linear layers."""
    shifted: bool = False
    """Train with shifted sparse attention."""
    raises_theta: bool = False
    drops_positions: bool = False
    """Replace RoPE by no encoding at all."""
    everything: bool = False
    """Train all weights."""
    embeddings_and_norms: bool = False
    """Whether embeddings and norms train by default."""


METHODS: dict[str, Method] = {
    "tape": Method(idea="TAPE instead of RoPE; only its update trains", tape="tape"),
    "lora": Method(idea="low-rank updates of the attention projections", lora=True),
    "tape+lora": Method(idea="TAPE instead of RoPE, and low-rank updates", tape="tape", lora=True),
    "longlora": Method(
        idea="LoRA, embeddings and norms, with shifted sparse attention while training",
        lora=True,
        shifted=True,
        embeddings_and_norms=True,
    ),
    "theta": Method(idea="a larger rotary base; all weights train", raises_theta=True, everything=True),
    "theta+lora": Method(idea="a larger rotary base, and low-rank updates", raises_theta=True, lora=True),
    "theta+tape+lora": Method(
        idea="a larger rotary base, TAPE instead of RoPE, and low-rank updates",
        raises_theta=True,
        tape="tape",
        lora=True,
    ),
    "tape2+lora": Method(
        idea="TAPE 2 without its decay instead of RoPE, and low-rank updates", tape="tape2", lora=True
    ),
    "theta+tape2+lora": Method(
        idea="a larger rotary base, TAPE 2 without its decay instead of RoPE, and low-rank updates",
        raises_theta=True,
        tape="tape2",
        lora=True,
    ),
    "drope": Method(idea="no positions any more (DroPE); all weights train", drops_positions=True, everything=True),
    "full": Method(idea="all weights train", everything=True),
}


@dataclass(frozen=True, kw_only=True)
class AdaptSettings(Settings):
    """How a pretrained model is adapted."""

    method: MethodName = "tape+lora"
    """What changes and what trains. The default was best on long text in our measurements."""
    context: Annotated[int, Ge(1)] | None = None
    """Context of the adapted model, in tokens. Default: the base's."""
    scaling: Literal["linear", "yarn"] | None = None
    """Interpolate positions so that the new context maps to the trained one. Default: no interpolation."""
    scaling_factor: Annotated[float, Gt(1)] | None = None
    """Factor of the interpolation. Default: the new context divided by the trained one."""
    theta: Annotated[float, Gt(1)] | None = None
    """Rotary base. Default: the base's; a hundred times that for the methods whose names begin with theta."""
    query_growth: Annotated[float, Ge(0)] | None = None
    """Growth of queries with the tokens read, which keeps attention sharp over more keys than in training: beyond the
    base's context they are multiplied by 1 + this * ln(tokens / context). Default: the base's, mostly none."""
    train_embeddings: bool | None = None
    """Also train token embeddings. Default: only for longlora."""
    train_norms: bool | None = None
    """Also train norms. Default: only for longlora."""
    lora_rank: Annotated[int, Ge(1), Le(1 << 16)] = 8
    """Rank of LoRA's updates."""
    lora_alpha: float = 16.0
    """LoRA's alpha; updates are scaled by alpha / rank."""
    lora_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout on the input of LoRA's updates."""
    lora_targets: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear layer that LoRA updates."""
    group_size: Annotated[int, Ge(1)] | None = None
    """Tokens per group of longlora's shifted sparse attention. Default: a quarter of the context."""
    tape: dict[str, Any] = field(default_factory=dict)
    """Option of the TAPE encoding, for example mixer_size=16."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Seed of new weights, data order and dropout."""

    def __post_init__(self) -> None:
        if not self.lora_targets:
            raise ValueError(f"lora_targets is empty; give one or more of {', '.join(get_args(Target))}.")
        if self.scaling_factor is not None and self.scaling is None:
            raise ValueError("scaling_factor is given without scaling; add scaling, or drop it.")
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raise ValueError for options that the method does not use."""
        method = METHODS[self.method]
        defaults = {entry: type(self).__dataclass_fields__[entry].default for entry in LORA_OPTIONS}
        unused = (
            [] if method.lora else [entry for entry, default in defaults.items() if getattr(self, entry) != default]
        )
        if self.tape and not method.tape:
            unused.append("tape")
        if self.group_size is not None and not method.shifted:
            unused.append("group_size")
        if method.drops_positions:
            unused += [entry for entry in ("scaling", "theta") if getattr(self, entry) is not None]
        if method.everything:
            unused += [entry for entry in ("train_embeddings", "train_norms") if getattr(self, entry) is False]
        if unused:
            raise ValueError(f"Method {self.method!r} does not use {', '.join(unused)}; drop it.")

    @property
    def effects(self) -> Method:
        """The definition of the chosen method."""
        return METHODS[self.method]

    def used(self) -> dict[str, Any]:
        """The settings that the chosen method uses, as text."""
        left_out = set() if self.effects.lora else set(LORA_OPTIONS)
        return {key: value for key, value in self.to_dict().items() if key not in left_out and value != {}}

    def trains(self, part: str) -> bool:
        """Whether "embeddings" or "norms" train."""
        asked = getattr(self, f"train_{part}")
        return self.effects.embeddings_and_norms if asked is None else asked


LORA_OPTIONS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")


@dataclass(kw_only=True)
class Adaptation:
    """How a model was adapted, and from which base."""

    settings: AdaptSettings
    base_name: str
    base: dict[str, Any]
    """The base's fingerprint."""
    trained: tuple[str, ...]
    """Names of the parameters that the method trains."""
    training: dict[str, Any] = field(default_factory=dict)
    """Data, settings and results of a fine-tuning run."""


def adaptation_of(model: Any) -> Adaptation:
    """The adaptation of a model made by `adapt`; raises ValueError for others."""
    adaptation = getattr(model, "adaptation", None)
    if adaptation is None:
        raise ValueError("This model was not made by equitape.adapt, so it has no adapter; use model.save_pretrained.")
    return adaptation
