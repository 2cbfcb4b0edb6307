"""The plan of an extension: a pure function of the base's configuration, the settings, the text and the device."""

from dataclasses import dataclass
from typing import Any

from ..adapt.settings import train_defaults
from ..model import EquitapeConfig
from ..pretrained.settings import AdaptSettings
from ..report.numbers import duration, quantity
from ..scale.costs import ModelCosts
from ..training.settings import Jumps, TrainSettings
from .estimates import Device, count_trained, fit_memory, usable_bytes
from .settings import UNTRAINED, WITHOUT_IDS, ExtendSettings

POLICY: dict[str, Any] = {
    "method": "theta+lora",
    "row_length": 4096,  # at most, and never above the base's context
    "jumps_per_row": 2,
    "jump_shape": "log",
    "batch_size": 8,
    "steps": 300,  # at most
    "passes": 4,  # over the text, at most
    "recall": 0.0,
}
"""What is chosen where the settings leave it open. It follows what docs/log.md has measured and will change with it."""

SHORT = (512, 1024, 2048)
"""Lengths at which a longer context must not cost quality."""
ROW_SECONDS = 120.0
"""Lengths beyond the new context are measured only where one row takes no longer than this by the estimate."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """How much text there is, in tokens."""

    train: int
    longest: int
    """The longest held-out document; of several texts, that of the text whose longest is shortest."""
    joined: int
    """All held-out documents read as one."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One line of the plan."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything an extension does."""

    adapt: AdaptSettings
    train: TrainSettings
    row_length: int
    recall: float
    short: tuple[int, ...]
    lengths: tuple[int, ...]
    """Long lengths of prompts."""
    needle_lengths: tuple[int, ...]
    text_lengths: tuple[int, ...]
    """Lengths at which perplexity is measured, as far as the held-out text reaches."""
    join: bool
    """Whether held-out documents are read as one."""
    samples: int
    depths: int
    windows: int
    choices: tuple[Choice, ...]
    trained: int
    """Weights that train."""
    parameters: int

    def identity(self) -> dict[str, Any]:
        """What decides the results, as plain data."""
        parts = {name: value for name, value in self.__dict__.items() if name not in ("choices", "adapt", "train")}
        return {**parts, "adapt": self.adapt.to_dict(), "train": self.train.to_dict()}


def make_plan(config: EquitapeConfig, settings: ExtendSettings, text: Text, device: Device) -> Plan:
    """Choose what the settings leave open, each choice with its reason."""
    context, to = config.context, settings.to
    if to <= context:
        raise ValueError(f"The base reads {context:,} tokens already; give a length above that for --to, not {to:,}.")
    row_length = choose_row_length(config, settings)
    adapt, positions = choose_method(config, settings, row_length)
    costs = ModelCosts(config)
    parameters = costs.parameters
    trained = count_trained(config, adapt, parameters)
    train, choices = choose_training(costs, settings, adapt, row_length, text, device, trained)
    beyond = 2 * to
    cheap = costs.forward(1, beyond).total / device.rate <= ROW_SECONDS
    lengths = tuple(sorted(set(settings.eval_lengths))) or doubled(context, to) + ((beyond,) if cheap else ())
    join = text.longest <= to and text.joined > text.longest
    text_lengths = reachable(
        tuple(sorted(set(settings.text_lengths))) or lengths, context, to, text.joined if join else text.longest
    )
    samples = settings.samples or (20 if device.kind == "cuda" else 2)
    plan = Plan(
        adapt=adapt,
        train=train,
        row_length=row_length,
        recall=choose_recall(settings),
        short=tuple(length for length in SHORT if length <= context) or tuple({max(context // 2, 1), context}),
        lengths=lengths,
        needle_lengths=tuple(sorted(set(settings.needle_lengths))) or lengths,
        text_lengths=text_lengths,
        join=join,
        samples=samples,
        depths=max(count for count in (1, 2, 5) if count <= samples and samples % count == 0),
        windows=settings.windows or (4 if device.kind == "cuda" else 1),
        choices=(*positions, *choices),
        trained=trained,
        parameters=parameters,
    )
    return Plan(**{**plan.__dict__, "choices": (*plan.choices, *describe_proof(plan, costs, settings, device))})


def choose_row_length(config: EquitapeConfig, settings: ExtendSettings) -> int:
    """Tokens of a training row."""
    return settings.row_length or min(config.context, POLICY["row_length"])


def choose_recall(settings: ExtendSettings) -> float:
    """Fraction of the rows with planted facts."""
    return POLICY["recall"] if settings.recall is None else settings.recall


def split_method(name: str) -> tuple[str | None, str]:
    """(scaling of positions, method of adapt) of a method's name."""
    first, _, rest = name.partition("+")
    return (first, rest) if first in UNTRAINED else (None, name)


def ntk_theta(config: EquitapeConfig, factor: float) -> float:
    """The rotary base whose lowest frequency turns as far in `factor` times the context as the old one did in it."""
    assert isinstance(config.encoding, dict) and config.head_dim is not None
    dim = config.head_dim
    return float(config.encoding["theta"]) * factor ** (dim / max(dim - 2, 1))


def choose_method(
    config: EquitapeConfig, settings: ExtendSettings, row_length: int
) -> tuple[AdaptSettings, list[Choice]]:
    """What changes in the model, and why."""
    named = POLICY["method"] if settings.method == "auto" else settings.method
    own, method = split_method(named)
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
        given["theta"] = ntk_theta(config, factor)
        positions = (
            f"theta {given['theta']:g}",
            f"NTK's rule for {factor:g} times the context: slow frequencies stretch, fast ones hardly change.",
        )
    else:
        positions = "unchanged", f"The method {method} learns the new distances from the jumps."
    if "theta" in method and scaling is not None and settings.theta is None:
        # the scaling replaces a larger base
        given["theta"] = float(encoding.get("theta", 10000.0))
    if method == "longlora":
        given["group_size"] = max(row_length // 4, 2)
    lora = {"lora_rank": settings.lora_rank, "lora_alpha": settings.lora_alpha, "lora_targets": settings.lora_targets}
    given |= {name: value for name, value in lora.items() if value}
    adapt = AdaptSettings.parse(given, "extend")
    why = "The policy's choice; see docs/results." if settings.method == "auto" else "You asked for this method."
    return adapt, [
        Choice(name="method", value=named, reason=f"{why} It means: {adapt.effects.idea}."),
        Choice(name="positions", value=positions[0], reason=positions[1]),
    ]


def choose_training(
    costs: ModelCosts,
    settings: ExtendSettings,
    adapt: AdaptSettings,
    row_length: int,
    text: Text,
    device: Device,
    trained: int,
) -> tuple[TrainSettings, list[Choice]]:
    """Rows, jumps, budget and learning rate, and why."""
    batch_size = settings.batch_size or POLICY["batch_size"]
    budget, why_budget = choose_budget(settings, row_length * batch_size, text)
    jumps = (
        Jumps(rate=0.0)
        if adapt.method in WITHOUT_IDS
        else settings.jumps
        or Jumps(
            rate=min(POLICY["jumps_per_row"] / row_length, 1.0),
            size=settings.to / row_length - 1,
            total=settings.to / row_length - 1,
            shape=POLICY["jump_shape"],
        )
    )
    room = usable_bytes(device, settings.memory)
    accumulation, checkpointing, memory = fit_memory(costs, device, trained, row_length, batch_size, room)
    given = {
        **train_defaults(adapt),
        **budget,
        "batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": checkpointing,
        "jumps": jumps if jumps.rate > 0 or jumps.stretch > 1 else None,
    }
    if settings.learning_rate is not None:
        given["learning_rate"] = settings.learning_rate
    train = TrainSettings.parse(given, "extend")
    few = "few weights train" if not adapt.effects.everything else "all weights train"
    shown = f"{batch_size // accumulation} at a time{', activations recomputed' if checkpointing else ''}"
    fits = "fits into" if memory <= room else "is more than"
    choices = [
        Choice(
            name="rows",
            value=f"{batch_size} of {row_length:,} tokens per step, {shown}",
            reason=f"Rows no longer than the base's context need no more memory than it; by the estimate training "
            f"takes {memory / 2**30:.1f} GiB, which {fits} the {room / 2**30:.0f} GiB that it may take here.",
        ),
        Choice(
            name="jumps",
            value="none" if train.jumps is None else f"rate {jumps.rate:.3g}, up to {jumps.largest(row_length):,} ids",
            reason="The method reads no position ids."
            if adapt.method in WITHOUT_IDS
            else "You set them."
            if settings.jumps is not None
            else f"About {POLICY['jumps_per_row']} jumps per row show the short rows all distances of the new context, "
            f"and none beyond it.",
        ),
        Choice(
            name="learning rate",
            value=f"{train.learning_rate:g}",
            reason="You set it." if settings.learning_rate is not None else f"The default of adapt where {few}.",
        ),
        Choice(
            name="budget",
            value=", ".join(
                f"{value:,g} {name}" if value < 1e6 else f"{value:,} {name}" for name, value in budget.items()
            ),
            reason=why_budget,
        ),
    ]
    recall = choose_recall(settings)
    if recall:
        choices.append(
            Choice(
                name="planted facts",
                value=f"in {100 * recall:g} % of the rows",
                reason="Asked for at the end of the row, they train finding things far back.",
            )
        )
    steps = budget.get("steps") or round(budget.get("tokens", 0) / (row_length * batch_size))
    seconds = (
        60 * settings.minutes
        if settings.minutes is not None
        else 3 * steps * batch_size * costs.forward(1, row_length).total / device.rate
    )
    choices.append(
        Choice(
            name="time of training",
            value=f"about {duration(seconds)}",
            reason="The budget."
            if settings.minutes is not None
            else f"An estimate from {quantity(costs.parameters)} parameters, assuming {device.rate:g} "
            f"operations per second.",
        )
    )
    return train, choices


def choose_budget(settings: ExtendSettings, tokens_per_step: int, text: Text) -> tuple[dict[str, Any], str]:
    """One of steps, tokens and minutes."""
    for name in ("minutes", "tokens", "steps"):
        value = getattr(settings, name)
        if value is not None:
            return {name: value}, "You set it."
    passes = max(1, POLICY["passes"] * text.train // tokens_per_step)
    if passes < POLICY["steps"]:
        return {"steps": passes}, (
            f"{POLICY['passes']} passes over the {text.train:,} tokens of text: more would learn them by heart. More "
            f"text (--data) allows more steps."
        )
    return {"steps": POLICY["steps"]}, "The policy's choice; see docs/results."


def doubled(first: int, last: int) -> tuple[int, ...]:
    """The first length, doubled as often as fits below the last, and the last."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return (*found, last)


def reachable(lengths: tuple[int, ...], context: int, to: int, available: int) -> tuple[int, ...]:
    """Lengths that the held-out text allows, at least one of them beyond the base's context."""
    # a window reads its length and predicts one token more; the end token of a document is not read
    most = available - 2
    kept = tuple(length for length in lengths if length <= most)
    if any(context < length <= to for length in kept):
        return kept
    step = max(context // 8, 1)
    longest = min(most, to) // step * step
    if longest <= context:
        raise ValueError(
            f"The held-out text reaches {max(available, 0):,} tokens, and showing more than the base's context needs "
            f"above {context + step:,}; name a longer text with --eval-data."
        )
    return (*kept, longest)


def describe_proof(plan: Plan, costs: ModelCosts, settings: ExtendSettings, device: Device) -> tuple[Choice, ...]:
    """What the proof measures and how long it takes by the estimate."""
    wanted = settings.text_lengths or plan.lengths
    left_out = [length for length in wanted if length > max(plan.text_lengths)]
    rows = sum(costs.forward(1, length).total * plan.samples for length in (*plan.lengths, *plan.needle_lengths))
    longest = max(plan.text_lengths)
    texts = sum(
        costs.forward(1, length).total * plan.windows * longest / length for length in {*plan.short, *plan.text_lengths}
    )
    seconds = 2 * (rows + texts) / device.rate
    return (
        Choice(
            name="perplexity at",
            value=listed(sorted({*plan.short, *plan.text_lengths})),
            reason="Short lengths show damage, long ones the gain."
            + (f" The held-out text is too short for {listed(left_out)}." if left_out else ""),
        ),
        Choice(
            name="passkey and needles at",
            value=listed(plan.lengths)
            + (f"; needles at {listed(plan.needle_lengths)}" if plan.needle_lengths != plan.lengths else ""),
            reason=f"{plan.samples} prompts per length and task, before and after.",
        ),
        Choice(
            name="time of the proof",
            value=f"about {duration(seconds)}",
            reason=f"An estimate, assuming {device.rate:g} operations per second.",
        ),
    )


def listed(lengths: Any) -> str:
    """Lengths in one line."""
    return ", ".join(f"{length:,}" for length in lengths)
