"""The methods of adapting: what becomes of the positions, and what is trained."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..model import EquitapeConfig, EquitapeForCausalLM
from ..registry import describe_choices
from ..settings import Settings
from .longlora import ShiftedSparseAttention
from .lora import add_lora

SCALINGS = ("linear", "yarn")
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUPS_OF_LONGLORA = 4
"""Groups of shifted sparse attention in a context, as in its paper."""
THETA_GROWTH = 100.0
"""By how much the method "theta" raises the rotary base: from 1e4 to 1e6, as TAPE's paper did for twice the context."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """What one method does."""

    idea: str
    tape: bool = False
    """TAPE takes RoPE's place, and its update trains."""
    lora: bool = False
    """Low-rank updates of linear layers train."""
    shifted: bool = False
    """Shifted sparse attention while training."""
    raises_theta: bool = False
    everything: bool = False
    """All weights train."""
    embeddings_and_norms: bool = False
    """Whether these train too unless told otherwise."""


METHODS: dict[str, Method] = {
    "tape": Method(idea="TAPE instead of RoPE; only its update trains", tape=True),
    "lora": Method(idea="low-rank updates of the attention projections", lora=True),
    "tape+lora": Method(idea="both", tape=True, lora=True),
    "longlora": Method(
        idea="LoRA, embeddings and norms, with shifted sparse attention while training",
        lora=True,
        shifted=True,
        embeddings_and_norms=True,
    ),
    "theta": Method(idea="a larger rotary base; all weights train", raises_theta=True, everything=True),
    "theta+lora": Method(idea="a larger rotary base, and low-rank updates", raises_theta=True, lora=True),
    "full": Method(idea="all weights train", everything=True),
}


@dataclass(frozen=True, kw_only=True)
class AdaptSettings(Settings):
    """How a pretrained model is adapted."""

    method: str = "tape"
    context: int | None = None
    """Tokens the adapted model is meant for; the source's when left out."""
    scaling: str | None = None
    """Interpolation of positions to the new context: "linear" or "yarn"; none when left out."""
    theta: float | None = None
    """The rotary base; the source's when left out, a hundred times that for the method "theta"."""
    train_embeddings: bool | None = None
    """Also train the token embeddings; when left out only longlora does."""
    train_norms: bool | None = None
    """Also train the norms; when left out only longlora does."""
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear layers that LoRA updates."""
    group_size: int | None = None
    """Tokens in a group of shifted sparse attention; a quarter of the context when left out."""
    tape: dict[str, Any] = field(default_factory=dict)
    """Options of the encoding TAPE, for example {"mixer_size": 16}."""
    seed: int = 0
    """Of new weights."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"There is no method {self.method!r}.{describe_choices(self.method, METHODS)}")
        if self.scaling is not None and self.scaling not in SCALINGS:
            raise ValueError(f"There is no scaling {self.scaling!r}.{describe_choices(self.scaling, SCALINGS)}")
        for name in ("context", "lora_rank", "group_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout is {self.lora_dropout}; it must be from 0 to below 1.")
        if not self.lora_targets:
            raise ValueError(f"lora_targets is empty; name some of {', '.join(LORA_TARGETS)}.")
        for name in self.lora_targets:
            if name not in LORA_TARGETS:
                raise ValueError(f"LoRA cannot update {name!r}.{describe_choices(name, LORA_TARGETS)}")
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """An option that the method would not read was meant for another method."""
        method = METHODS[self.method]
        defaults = {entry: type(self).__dataclass_fields__[entry].default for entry in LORA_OPTIONS}
        unused = (
            [] if method.lora else [entry for entry, default in defaults.items() if getattr(self, entry) != default]
        )
        if self.tape and not method.tape:
            unused.append("tape")
        if self.group_size is not None and not method.shifted:
            unused.append("group_size")
        if method.everything:
            unused += [entry for entry in ("train_embeddings", "train_norms") if getattr(self, entry) is False]
        if unused:
            raise ValueError(f"The method {self.method!r} has no use for {', '.join(unused)}; leave it out.")

    @property
    def plan(self) -> Method:
        """What the chosen method does."""
        return METHODS[self.method]

    def used(self) -> dict[str, Any]:
        """What matters to the chosen method, for people."""
        left_out = set() if self.plan.lora else set(LORA_OPTIONS)
        return {key: value for key, value in self.to_dict().items() if key not in left_out and value != {}}

    def trains(self, part: str) -> bool:
        """Whether "embeddings" or "norms" train."""
        asked = getattr(self, f"train_{part}")
        return self.plan.embeddings_and_norms if asked is None else asked


LORA_OPTIONS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")


def change_config(source: EquitapeConfig, settings: AdaptSettings) -> EquitapeConfig:
    """The configuration after adapting, from the source's."""
    longer = EquitapeConfig.from_dict(source.to_dict())
    if settings.context is not None:
        longer.extend(settings.context)
    given = longer.to_dict()
    given["encoding"] = change_encoding(source, settings)
    config = EquitapeConfig.from_dict(given)
    if settings.plan.shifted:
        shifted_attention(config, settings).check(config)
    return config


def shifted_attention(config: EquitapeConfig, settings: AdaptSettings) -> ShiftedSparseAttention:
    """LongLoRA's attention for the context that a model, configured by `change_config`, is meant for."""
    context = settings.context or config.context
    return ShiftedSparseAttention(settings.group_size or max(context // GROUPS_OF_LONGLORA, 2))


def change_encoding(source: EquitapeConfig, settings: AdaptSettings) -> dict[str, Any]:
    """The encoding after adapting."""
    plan = settings.plan
    assert isinstance(source.encoding, dict)
    encoding = dict(source.encoding)
    changes = plan.tape or plan.raises_theta or settings.theta is not None or settings.scaling is not None
    if changes and encoding["kind"] not in ("rope", "tape"):
        raise ValueError(
            f"The source's positions are encoded by {encoding['kind']!r}; the method {settings.method!r} changes "
            f"rotary positions, so it needs 'rope' or 'tape'."
        )
    if plan.tape:
        encoding = {**encoding, "kind": "tape", **settings.tape}
    if settings.theta is not None or plan.raises_theta:
        encoding["theta"] = settings.theta or encoding["theta"] * THETA_GROWTH
    if settings.scaling is not None:
        encoding["scaling"] = stretch(encoding["scaling"], source.context, settings)
    return encoding


def stretch(scaling: dict[str, Any], trained: int, settings: AdaptSettings) -> dict[str, Any]:
    """The scaling of rotary frequencies that fits the new context into the trained one."""
    if settings.context is None or settings.context <= trained:
        raise ValueError(
            f"The scaling {settings.scaling!r} stretches the trained context of {trained} tokens to a longer one; "
            f"context is {settings.context}, give one above {trained}."
        )
    kind = scaling["kind"]
    if kind not in ("default", settings.scaling):
        raise ValueError(
            f"The source scales its positions by {kind!r} already, and {settings.scaling!r} cannot be put on top; "
            f"leave the scaling out, or change theta."
        )
    factor = settings.context / trained
    if kind == "default":
        return {"kind": settings.scaling, "factor": factor, "original_max_positions": trained}
    if kind == "yarn":
        factor = settings.context / scaling["original_max_positions"]
        return {**scaling, "factor": factor, "attention_factor": None}
    return {**scaling, "factor": scaling["factor"] * factor}


def set_training(model: EquitapeForCausalLM, settings: AdaptSettings) -> None:
    """Add LoRA's layers where the method has them, and let only what the method trains take gradients."""
    plan = settings.plan
    if plan.lora:
        add_lora(model, settings)
    if plan.shifted:
        model.model.training_attention = shifted_attention(model.config, settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            plan.everything
            or (plan.tape and is_encoding(name))
            or (plan.lora and ".lora_" in name)
            or (settings.trains("embeddings") and name == "model.embed_tokens.weight")
            or (settings.trains("norms") and is_norm(name))
        )
    if plan.tape and not any(is_encoding(name) for name, _ in trained_parameters(model)):
        raise ValueError(
            "No block of this model updates TAPE's field, so there is nothing to train; it needs two layers."
        )


def is_encoding(name: str) -> bool:
    """Whether a parameter belongs to the positional encoding."""
    return "encoding" in name.split(".")


def is_norm(name: str) -> bool:
    """Whether a parameter belongs to a norm: of a block, of queries and keys, or the last one."""
    return name.split(".")[-2].endswith("norm")


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that take gradients, by name; tied ones once."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


@dataclass(frozen=True)
class TrainingSummary:
    """How much of a model trains."""

    tensors: int
    parameters: int
    total: int

    @property
    def share(self) -> float:
        """Of all parameters, from 0 to 1."""
        return self.parameters / self.total

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors, {self.parameters:,} of {self.total:,} parameters, {self.share:.3%} of the model"
        )


def summarize_training(model: nn.Module) -> TrainingSummary:
    """Count what trains. Tied weights count once."""
    sizes = [parameter.numel() for _, parameter in trained_parameters(model)]
    return TrainingSummary(len(sizes), sum(sizes), sum(parameter.numel() for parameter in model.parameters()))
