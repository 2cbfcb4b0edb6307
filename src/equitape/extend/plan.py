"""The plan of an extension: a pure function of the base's configuration, the settings, the text and the device."""

from dataclasses import dataclass
from typing import Any

from ..adapt.settings import train_defaults
from ..model import EquitapeConfig
from ..pretrained.methods import change_config
from ..pretrained.settings import AdaptSettings
from ..registry import counted
from ..report.numbers import duration, quantity
from ..scale.costs import ModelCosts
from ..training.settings import Jumps, TrainSettings
from .estimates import Device, count_trained, fit_memory, training_seconds, usable_bytes
from .lengths import Proof, choose_proof, listed, shorten
from .methods import choose_method
from .policy import POLICY, Choice
from .settings import BUDGETS, WITHOUT_IDS, ExtendSettings

CPU_MINUTES = 15.0
"""Of training on a CPU, by the estimate, where no budget is given."""
CPU_PROOF = 0.5
"""How long the proof may take on a CPU, by the estimate, as a multiple of the training."""
FEWEST_STEPS = 40
"""Steps are made smaller, down to SMALLEST_ROWS, until this many fit into the minutes."""
SMALLEST_ROWS = (512, 2)
"""Row length and batch size."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """How much text there is, in tokens."""

    train: int
    longest: int
    """The longest held-out document; of several texts, that of the text whose longest is shortest."""
    joined: int
    """All held-out documents read as one."""
    documents: tuple[int, ...] = ()
    """Lengths of the documents to train on."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long the training is."""

    given: dict[str, Any]
    """One of steps, tokens and minutes."""
    reason: str
    tokens: float
    """Of the whole training; an estimate where the budget is in minutes."""
    seconds: float
    """An estimate where the budget is not in minutes."""


@dataclass(frozen=True, kw_only=True)
class ExtensionPlan(Proof):
    """Everything an extension does: what it trains and what it measures."""

    adapt: AdaptSettings
    train: TrainSettings
    row_length: int
    whole_rows: bool
    """Whether the ends of documents, which share rows, are left out."""
    recall: float
    join: bool
    """Whether held-out documents are read as one."""
    depths: int
    choices: tuple[Choice, ...]
    trained: int
    """Weights that train."""
    parameters: int

    def identity(self) -> dict[str, Any]:
        """What decides the results, as plain data."""
        parts = {name: value for name, value in self.__dict__.items() if name not in ("choices", "adapt", "train")}
        if not self.whole_rows:
            # as in folders of version 0.2
            del parts["whole_rows"]
        return {**parts, "adapt": self.adapt.to_dict(), "train": {**self.train.to_dict(), "compile": False}}


def make_plan(config: EquitapeConfig, settings: ExtendSettings, text: Text, device: Device) -> ExtensionPlan:
    """Choose what the settings leave open, each choice with its reason."""
    check_length(config, settings)
    costs = ModelCosts(config)
    row_length, batch_size = choose_rows(config, settings, device)
    if text.train < row_length:
        raise ValueError(f"The data has {text.train:,} tokens, too few for one row of {row_length:,}; give more text.")
    step = training_seconds(costs, device, batch_size, row_length)
    budget = choose_budget(settings, row_length * batch_size, text, device, step)
    adapt, positions = choose_method(config, settings, row_length, budget.tokens)
    # refuses what the base's positions do not allow
    change_config(config, adapt)
    parameters = costs.parameters
    trained = count_trained(config, adapt, parameters)
    train, choices = choose_training(costs, settings, adapt, (row_length, batch_size), budget, device, trained)
    join = text.longest <= settings.to and text.joined > text.longest
    minutes = minutes_of(settings, device)
    limit = 60 * CPU_PROOF * minutes if minutes is not None and device.kind == "cpu" else None
    whole = choose_proof(config, settings, costs, device, text.joined if join else text.longest)
    proof = whole if limit is None else shorten(whole, settings, costs, device, limit)
    whole_rows, ends = choose_whole_rows(settings, text, row_length)
    return ExtensionPlan(
        adapt=adapt,
        train=train,
        row_length=row_length,
        whole_rows=whole_rows,
        recall=choose_recall(settings),
        join=join,
        depths=max(count for count in (1, 2, 5) if count <= proof.samples and proof.samples % count == 0),
        choices=(*positions, *ends, *choices, *describe_proof(proof, whole, costs, settings, device)),
        trained=trained,
        parameters=parameters,
        **vars(proof),
    )


def check_length(config: EquitapeConfig, settings: ExtendSettings) -> None:
    """Raise ValueError for a context that the base has already, and for rows above it."""
    if settings.to <= config.context:
        raise ValueError(
            f"The base reads {config.context:,} tokens already; give a length above that for --to, not {settings.to:,}."
        )
    if settings.row_length is not None and settings.row_length > settings.to:
        raise ValueError(f"row_length is {settings.row_length}; it must be at most the context, {settings.to} tokens.")


def minutes_of(settings: ExtendSettings, device: Device) -> float | None:
    """Minutes of training that rows, steps and proof have to suit; None where any will do."""
    if settings.minutes is not None:
        return settings.minutes
    given = settings.steps is not None or settings.tokens is not None
    return CPU_MINUTES if device.kind == "cpu" and not given else None


def choose_rows(config: EquitapeConfig, settings: ExtendSettings, device: Device) -> tuple[int, int]:
    """(tokens of a training row, rows per step): the policy's, or fewer where the minutes allow few steps."""
    row_length = settings.row_length or min(config.context, POLICY["row_length"])
    batch_size = settings.batch_size or POLICY["batch_size"]
    minutes = minutes_of(settings, device)
    if minutes is None:
        return row_length, batch_size
    costs = ModelCosts(config)
    while training_seconds(costs, device, FEWEST_STEPS * batch_size, row_length) > 60 * minutes:
        if settings.batch_size is None and batch_size > SMALLEST_ROWS[1]:
            batch_size //= 2
        elif settings.row_length is None and row_length > SMALLEST_ROWS[0]:
            row_length //= 2
        else:
            break
    return row_length, batch_size


def choose_whole_rows(settings: ExtendSettings, text: Text, row_length: int) -> tuple[bool, list[Choice]]:
    """Whether the ends of documents, which share rows, are left out, and why."""
    tokens = sum(text.documents)
    kept = sum(length // row_length for length in text.documents) * row_length
    if not (kept >= POLICY["whole_rows"] * tokens > 0 if settings.whole_rows is None else settings.whole_rows):
        return False, []
    why = "You asked for it" if settings.whole_rows else "They would share rows, which show short distances only"
    return True, [
        Choice(
            name="ends of documents",
            value=f"left out: {100 * (tokens - kept) / max(tokens, 1):.2g} % of the text",
            reason=f"{why}. On a GPU such rows also need a kernel that takes a minute to compile.",
        )
    ]


def choose_recall(settings: ExtendSettings) -> float:
    """Fraction of the rows with planted facts."""
    return POLICY["recall"] if settings.recall is None else settings.recall


def choose_training(
    costs: ModelCosts,
    settings: ExtendSettings,
    adapt: AdaptSettings,
    rows: tuple[int, int],
    budget: Budget,
    device: Device,
    trained: int,
) -> tuple[TrainSettings, list[Choice]]:
    """Jumps, learning rate and memory, and why. rows: tokens of a row, and rows per step."""
    row_length, batch_size = rows
    jumps = choose_jumps(settings, adapt, row_length)
    room = usable_bytes(device, settings.memory)
    accumulation, checkpointing, memory = fit_memory(costs, device, trained, row_length, batch_size, room)
    given = {
        **train_defaults(adapt),
        **budget.given,
        "batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": checkpointing,
        "jumps": jumps if jumps.rate > 0 or jumps.stretch > 1 else None,
        "compile": "blocks" if settings.compile else False,
    }
    if settings.learning_rate is not None:
        given["learning_rate"] = settings.learning_rate
    train = TrainSettings.parse(given, "extend")
    few = "few weights train" if not adapt.effects.everything else "all weights train"
    shown = f"{batch_size // accumulation} at a time{', activations recomputed' if checkpointing else ''}"
    fits = "fits into" if memory <= room else "is more than"
    why = "Rows no longer than the base's context need no more memory than it; by the estimate"
    if row_length > costs.config.context:
        why = "You asked for rows longer than the base's context. By the estimate"
    choices = [
        Choice(
            name="rows",
            value=f"{batch_size} of {row_length:,} tokens per step, {shown}",
            reason=f"{why} training takes {memory / 2**30:.1f} GiB, which {fits} the {room / 2**30:.0f} GiB that it "
            f"may take here.",
        ),
        Choice(
            name="jumps",
            value="none" if train.jumps is None else f"rate {jumps.rate:.3g}, up to {jumps.largest(row_length):,} ids",
            reason="The method reads no position ids."
            if adapt.method in WITHOUT_IDS
            else f"You set {', '.join(settings.jumps)}."
            if settings.jumps
            else "The rows are as long as the new context."
            if row_length == settings.to
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
                f"{format(value, ',g' if value < 1e6 else ',')} {name.removesuffix('s') if value == 1 else name}"
                for name, value in budget.given.items()
            ),
            reason=budget.reason,
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
    choices.append(
        Choice(
            name="time of training",
            value=f"about {duration(budget.seconds)}",
            reason="The budget."
            if settings.minutes is not None
            else f"An estimate from {quantity(costs.parameters)} parameters, assuming {device.rate:g} "
            f"operations per second.",
        )
    )
    return train, choices


def choose_jumps(settings: ExtendSettings, adapt: AdaptSettings, row_length: int) -> Jumps:
    """Jumps that show short rows the distances of the new context, but for what the settings name."""
    if adapt.method in WITHOUT_IDS:
        return Jumps(rate=0.0)
    largest = settings.to / row_length - 1
    if largest == 0 and not settings.jumps:
        return Jumps(rate=0.0)
    chosen = {
        "rate": min(POLICY["jumps_per_row"] / row_length, 1.0),
        "shape": POLICY["jump_shape"],
        **({"size": largest, "total": largest} if largest > 0 else {}),
    }
    return Jumps.parse({**chosen, **(settings.jumps or {})}, "jumps")


def choose_budget(settings: ExtendSettings, tokens_per_step: int, text: Text, device: Device, step: float) -> Budget:
    """The budget of the settings, or of the policy. step: seconds of one by the estimate."""
    given = {name: getattr(settings, name) for name in BUDGETS if getattr(settings, name) is not None}
    if given:
        (name, value), reason = next(iter(given.items())), "You set it."
    else:
        name, value, reason = policy_budget(settings, tokens_per_step, text, device, step)
    steps = {"steps": value, "tokens": value / tokens_per_step, "minutes": 60 * value / step}[name]
    return Budget(given={name: value}, reason=reason, tokens=steps * tokens_per_step, seconds=steps * step)


def policy_budget(
    settings: ExtendSettings, tokens_per_step: int, text: Text, device: Device, step: float
) -> tuple[str, int, str]:
    """(kind, size, reason) of a budget from the policy, the text and the device."""
    minutes = minutes_of(settings, device)
    possible = POLICY["steps"] if minutes is None else max(1, int(60 * minutes / step))
    passes = max(1, POLICY["passes"] * text.train // tokens_per_step)
    fewest = min(possible, passes, POLICY["steps"])
    reason = "About as many as we measured; see docs/results."
    if fewest == passes < POLICY["steps"]:
        reason = (
            f"{POLICY['passes']} passes over the {text.train:,} tokens of text: more would learn them by heart. More "
            f"text (--data) allows more steps."
        )
    elif fewest == possible < POLICY["steps"]:
        reason = f"About {CPU_MINUTES:g} minutes on this CPU by the estimate; --minutes or --steps set another budget."
    return "steps", fewest, reason


def describe_proof(
    proof: Proof, whole: Proof, costs: ModelCosts, settings: ExtendSettings, device: Device
) -> tuple[Choice, ...]:
    """What the proof measures and how long it takes by the estimate. whole: what it would be with time for all."""
    seconds = proof.seconds(costs, device, settings.measure)
    wanted = settings.text_lengths or whole.lengths
    left_out = [length for length in wanted if length > max(whole.text_lengths)]
    too_short = f" The held-out text is too short for {listed(left_out)}." if left_out else ""
    prompts = f"{counted(proof.samples, 'prompt')} per length, before and after."
    lines = {
        "perplexity": (
            {*proof.short, *proof.text_lengths},
            f"Short lengths show damage, long ones the gain.{too_short}",
        ),
        "passkey": (proof.lengths, prompts),
        "needles": (proof.needle_lengths, prompts),
    }
    return (
        *(
            Choice(name=f"{task} at", value=listed(sorted(lengths)), reason=reason)
            for task, (lengths, reason) in lines.items()
            if task in settings.measure
        ),
        Choice(
            name="time of the proof",
            value=f"about {duration(seconds)}",
            reason=f"An estimate for two models, assuming {device.rate:.2g} operations per second."
            + ("" if proof == whole else " It is small, to suit the minutes; --samples and --eval-lengths add more."),
        ),
    )
