"""What changes in the model: the method, and the positions that suit the new context."""

from typing import Any

from ..encodings.tape import updating_blocks
from ..model import EquitapeConfig
from ..pretrained.settings import METHODS, AdaptSettings
from .lengths import listed
from .policy import POLICY, Choice
from .settings import UNTRAINED, WITHOUT_IDS, ExtendSettings

BEST = (
    "The best we measured on SmolLM2-135M (docs/results) for its cost, and other programs can run it (--save native). "
    "TAPE 2 on top (theta+tape2+lora) found every passkey up to the new length with each of three seeds, and lowered "
    "perplexity by 0.03 to 1.9 %; in six of thirty blocks, with one seed, it found as many and lowered it by 0.1 to "
    "1.6 %. It trains and reads more slowly, and its cache is larger."
)
"""Why the policy's method."""


def split_method(name: str) -> tuple[str | None, str]:
    """(scaling of positions, method of adapt) of a method's name."""
    first, _, rest = name.partition("+")
    return (first, rest) if first in UNTRAINED else (None, name)


def chosen_method(settings: ExtendSettings) -> str:
    """The name of the extension's own method."""
    return POLICY["method"] if settings.method == "auto" else settings.method


def ntk_theta(config: EquitapeConfig, factor: float) -> float:
    """The rotary base whose lowest frequency turns as far in `factor` times the context as the old one did in it."""
    assert isinstance(config.encoding, dict) and config.head_dim is not None
    dim = config.head_dim
    return float(config.encoding["theta"]) * factor ** (dim / max(dim - 2, 1))


def choose_theta(config: EquitapeConfig, settings: ExtendSettings, tokens: float) -> tuple[float, str]:
    """A larger rotary base, and why."""
    factor = settings.to / config.context
    rule = "slow frequencies stretch, fast ones hardly change"
    if settings.scaling_factor is not None:
        return ntk_theta(config, settings.scaling_factor), f"NTK's rule for the factor you set: {rule}."
    if tokens < POLICY["theta_tokens"]:
        return ntk_theta(config, factor), (
            f"NTK's rule for {factor:g} times the context: {rule}. More than a million tokens of training would allow "
            f"a larger base, which reaches further."
        )
    reach = POLICY["theta_reach"]
    return ntk_theta(config, reach * factor), (
        f"NTK's rule for {reach:g} times the new context: {rule}. For the new context itself, retrieval broke off at "
        f"half of it where we measured it."
    )


def choose_growth(config: EquitapeConfig, settings: ExtendSettings, scaling: str | None) -> tuple[float | None, str]:
    """How queries grow with the tokens read, None for the base's growth, and why."""
    if settings.query_growth is not None:
        return settings.query_growth, "You set it."
    if config.query_growth:
        return None, f"The base was trained with {config.query_growth:g}."
    if scaling == "yarn":
        return None, "YaRN makes scores larger itself."
    if settings.save == "native":
        return None, "In the base's own architecture, which you asked for, queries do not grow."
    return POLICY["query_growth"], (
        "Over more keys than in training attention gets flatter, so queries grow with the logarithm of the tokens "
        "read. On SmolLM2-135M this lowered perplexity at 65,536 tokens by 6 %; twice as much lowered it by 8 % and "
        "lost passkeys."
    )


def choose_blocks(config: EquitapeConfig, settings: ExtendSettings) -> tuple[dict[str, Any], list[Choice]]:
    """Options of TAPE that say in which blocks it updates, and why."""
    name, given = "updates of TAPE", (settings.tape or {}).get("layers")
    if given is not None:
        return {}, [Choice(name=name, value=f"layers {given}", reason="You set it.")]
    assert isinstance(config.encoding, dict)
    if config.encoding["kind"] != "rope":
        return {}, [Choice(name=name, value="in the base's blocks", reason="The base has TAPE already.")]
    count = config.geometry.num_layers
    chosen: list[int] = []
    # layers with an encoding of their own update nothing
    for index in sorted(updating_blocks("all", config.geometry) - {layer % count for layer in config.local_layers}):
        if not chosen or index >= chosen[-1] + POLICY["tape_blocks"]:
            chosen.append(index)
    if not chosen:
        raise ValueError(
            "No block of this base can update TAPE's field: the last block never does, nor do layers with an encoding "
            "of their own. Use a method without TAPE, such as theta+lora."
        )
    reason = (
        "In six of SmolLM2-135M's thirty blocks TAPE 2 read and found as much as in all (one seed), with a fifth of "
        "what it adds to weights, cache and work; --tape layers=all updates in all."
    )
    return {"layers": chosen}, [
        Choice(name=name, value=f"in {len(chosen)} of {count} blocks: {listed(chosen)}", reason=reason)
    ]


def choose_method(
    config: EquitapeConfig, settings: ExtendSettings, row_length: int, tokens: float
) -> tuple[AdaptSettings, list[Choice]]:
    """What changes in the model, and why. tokens: of the whole training."""
    named = chosen_method(settings)
    own, method = split_method(named)
    if own is not None and settings.scaling not in (None, own):
        raise ValueError(f"The method {named} scales positions by {own}; drop the scaling {settings.scaling!r}.")
    scaling, factor = settings.scaling or own, settings.scaling_factor or settings.to / config.context
    encoding = config.encoding if isinstance(config.encoding, dict) else {}
    given: dict[str, Any] = {"method": method, "context": settings.to, "seed": settings.seed}
    if settings.theta is not None:
        given["theta"] = settings.theta
    if scaling is not None:
        given["scaling"], given["scaling_factor"] = scaling, settings.scaling_factor
        on = f", theta {settings.theta:g}" if settings.theta is not None else ""
        why = "You asked for this scaling." if settings.scaling else f"Part of the method {named}."
        positions = f"{scaling} by {factor:g}{on}", why
    elif settings.theta is not None:
        positions = f"theta {settings.theta:g}", "You asked for this rotary base."
    elif method in WITHOUT_IDS:
        positions = "dropped", "Without positions there is no length that the model has not seen."
    elif method == "longlora":
        given["scaling"], given["scaling_factor"] = "linear", settings.scaling_factor
        positions = f"linear by {factor:g}", "Groups learn no larger distances otherwise."
    elif "theta" in method and "theta" in encoding:
        given["theta"], why = choose_theta(config, settings, tokens)
        positions = f"theta {given['theta']:.3g}", why
    else:
        positions = "unchanged", f"The method {method} learns the new distances from the jumps."
    if "theta" in method and scaling is not None and settings.theta is None:
        # the scaling replaces a larger base
        given["theta"] = float(encoding.get("theta", 10000.0))
    growth, why_growth = choose_growth(config, settings, scaling)
    given["query_growth"] = growth
    start = config.query_growth_start or config.context
    grows = f"{growth:g} beyond {start:,} tokens" if growth else "unchanged" if growth is None else "none"
    if method == "longlora":
        given["group_size"] = max(row_length // 4, 2)
    blocks: list[Choice] = []
    tape = settings.tape
    if METHODS[method].tape:
        own_blocks, blocks = choose_blocks(config, settings)
        tape = {**(settings.tape or {}), **own_blocks}
    lora = {"lora_rank": settings.lora_rank, "lora_alpha": settings.lora_alpha, "lora_targets": settings.lora_targets}
    given |= {name: value for name, value in {**lora, "tape": tape}.items() if value or value == 0}
    adapt = AdaptSettings.parse(given, "extend")
    why = BEST if settings.method == "auto" else "You asked for this method."
    return adapt, [
        Choice(name="method", value=named, reason=f"{why} It means: {adapt.effects.idea}."),
        Choice(name="positions", value=positions[0], reason=positions[1]),
        Choice(name="query growth", value=grows, reason=why_growth),
        *blocks,
    ]
