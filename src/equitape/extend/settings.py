"""The settings of an extension; imports nothing heavy."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from ..pretrained.settings import MethodName, Target
from ..registry import describe_choices
from ..settings import Ge, Gt, Le, Settings
from ..training.settings import Count, Jumps, Seed, Share
from ..values import set_value

UNTRAINED = ("yarn", "linear")
"""Comparators that only scale positions."""
WITHOUT_JUMPS = "-plain"
"""Ends the name of a comparator whose ids do not jump."""
WITHOUT_IDS = ("drope",)
"""Methods whose models read no position ids, so jumps mean nothing to them."""
ScaledName = Literal["yarn+lora", "yarn+tape+lora", "yarn+tape2+lora"]
"""Methods of adapt on top of scaled positions: SCALING+METHOD."""
COMPARED_METHODS = (
    "theta", "theta+lora", "lora", "longlora", "tape", "tape+lora", "theta+tape+lora", "tape2+lora", "theta+tape2+lora",
    *get_args(ScaledName),
)  # fmt: skip
Measure = Literal["perplexity", "passkey", "needles", "agreement", "lm-eval"]
COMPARATORS = (
    *UNTRAINED,
    *(f"{method}{jumps}" for method in COMPARED_METHODS for jumps in ("", WITHOUT_JUMPS)),
    *WITHOUT_IDS,
)
Tokens = Annotated[int, Ge(2), Le(10**8)]
BUDGETS = ("minutes", "tokens", "steps")
EVERY_COMPARATOR = "all"
OVERRIDES = (
    "theta", "scaling", "scaling_factor", "learning_rate", "recall", "jumps", "row_length", "batch_size", "steps",
    "query_growth", "lora_rank", "lora_alpha", "lora_targets", "tape", "seed",
)  # fmt: skip
"""Settings that a comparator can have for itself, as in theta+lora@theta=4e6,recall=0.5."""
COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True, kw_only=True)
class ExtendSettings(Settings):
    """What to extend to, within which budget, and what counts as a success. The plan chooses what is not given."""

    to: Tokens
    """The new context in tokens, above the base's."""
    method: Literal["auto", MethodName, ScaledName] = "auto"
    """What changes and what trains; auto follows the plan."""
    minutes: Annotated[float, Gt(0)] | None = None
    """Budget in minutes of training on this machine. Default: a budget in steps, from the plan."""
    tokens: Count | None = None
    """Budget in tokens of training."""
    steps: Count | None = None
    """Budget in optimizer steps."""
    row_length: Annotated[int, Ge(2)] | None = None
    """Tokens of a training row. Default: the base's context, at most 4096."""
    batch_size: Count | None = None
    """Rows per optimizer step. Default: 8."""
    whole_rows: bool | None = None
    """Train only on rows that are one piece of one document, without the ends of documents. Default: where these are
    at most a tenth of the text."""
    compile: bool = False
    """Compile the model's blocks for training, which takes a minute at the start and makes steps faster."""
    jumps: dict[str, Any] | None = None
    """How ids jump ahead while training, for example rate=0.001 or shape=uniform; rate=0 turns jumps off. What is not
    named comes from the plan."""
    recall: Share | None = None
    """Fraction of the rows in which facts are planted and asked for at the end. Default: from the plan."""
    learning_rate: Annotated[float, Gt(0)] | None = None
    """The highest learning rate. Default: that of adapt for the method."""
    memory: Annotated[float, Gt(0)] | None = None
    """GiB that training may take. Default: 80 % of a GPU's memory, half of the machine's on a CPU."""
    scaling: Literal["linear", "yarn"] | None = None
    """Interpolate positions instead of raising theta. Default: from the plan."""
    scaling_factor: Annotated[float, Gt(1)] | None = None
    """Factor for which positions are scaled, or theta is raised by NTK's rule. Default: the new context divided by the
    base's."""
    theta: Annotated[float, Gt(1)] | None = None
    """Rotary base. Default: from the plan."""
    query_growth: Annotated[float, Ge(0)] | None = None
    """Growth of queries with the tokens read: beyond the base's context they are multiplied by
    1 + this * ln(tokens / context). Default: from the plan."""
    lora_rank: Annotated[int, Ge(1), Le(1 << 16)] | None = None
    """Rank of LoRA's updates. Default: that of adapt."""
    lora_alpha: float | None = None
    """LoRA's alpha; updates are scaled by alpha / rank. Default: that of adapt."""
    lora_targets: tuple[Target, ...] = ()
    """Linear layer that LoRA updates. Default: those of adapt."""
    tape: dict[str, Any] | None = None
    """Option of the TAPE encoding, for example layers=[0,1,2] or layers=all. Default: updates in every fifth block, and
    else those of adapt."""
    data: tuple[str, ...] = ("shipped:train",)
    """Text to train on: a file, folder, archive or hf:NAME:CONFIG:SPLIT."""
    eval_data: tuple[str, ...] = ("shipped:valid",)
    """Held-out text for the perplexity before and after."""
    tokenizer: str | None = None
    """Folder of the tokenizer. Default: the base's."""
    tolerance: Annotated[float, Ge(1)] = 1.01
    """A success needs a perplexity at short lengths of at most this many times the original's."""
    retrieval_tolerance: Annotated[float, Ge(0)] = 5.0
    """A success needs passkey and needle scores that fell by at most so many points."""
    eval_lengths: tuple[Tokens, ...] = ()
    """Long lengths of the proof, for example 8192,65536. Default: the base's context, doubled up to twice the
    new one."""
    samples: Annotated[int, Ge(1)] | None = None
    """Prompts per length of passkey and of needles. Default: 20 on a GPU, 2 elsewhere."""
    windows: Count | None = None
    """Pieces per held-out document whose perplexity is measured. Default: 4 on a GPU, 1 elsewhere."""
    needle_lengths: tuple[Tokens, ...] = ()
    """Lengths of needles, where not those of the passkey."""
    text_lengths: tuple[Tokens, ...] = ()
    """Long lengths of perplexity, where not those of the passkey."""
    measure: tuple[Measure, ...] = get_args(Measure)
    """What to measure. Without perplexity there is no verdict."""
    harness: str | None = None
    """Task of lm-evaluation-harness that shows damage at short lengths, for example hellaswag. Default, where lm-eval
    is installed: last words of passages of the held-out text."""
    batch_tokens: Count | None = None
    """Tokens evaluated at a time. Default: as many as fit in memory."""
    compare: tuple[str, ...] = ()
    """Another way to extend, shown in the same tables: yarn and linear scale positions without training, all others
    train with the same data and budget; -plain leaves out the jumps; all means every one of them. Settings of one
    comparator alone follow @, as in theta+lora@theta=4e6,recall=0.5."""
    save: Literal["adapter", "model", "native"] = "adapter"
    """What to write: the trained tensors; or also the whole model, in the folder `model`; or also the whole model in
    the base's own architecture, in the folder `native`, for programs that do not know this package."""
    seed: Seed = 0
    """Seed of new weights, of the order of data and of the prompts."""

    def __post_init__(self) -> None:
        Jumps.parse(self.jumps or {}, "jumps")
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; a budget is one of minutes, tokens and steps.")
        if self.harness is not None and "lm-eval" not in self.measure:
            raise ValueError(
                f"harness is {self.harness!r}, but measure leaves out lm-eval; add lm-eval to measure, or leave out "
                f"harness."
            )
        for name in self.compare:
            way, _ = split_comparator(name)
            if way not in (*COMPARATORS, EVERY_COMPARATOR):
                found = describe_choices(way, (*COMPARATORS, EVERY_COMPARATOR))
                raise ValueError(f"There is no comparator {way!r}.{found}")
        if not self.measure:
            raise ValueError(f"measure is empty; give one or more of {', '.join(get_args(Measure))}.")
        if not self.data or not self.eval_data:
            raise ValueError("data and eval_data each need a text; name one, or leave the option out.")
        same = sorted(set(self.data) & set(self.eval_data))
        if same:
            raise ValueError(
                f"{same[0]!r} is in data and in eval_data; a proof needs text that was not trained on. Name another "
                f"text for one of them."
            )


def split_comparator(name: str) -> tuple[str, dict[str, Any]]:
    """(name without settings, the settings) of NAME@SETTING=VALUE,SETTING=VALUE."""
    way, _, rest = name.partition("@")
    changes: dict[str, Any] = {}
    for pair in COMMA_OUTSIDE_BRACKETS.split(rest) if rest else ():
        if "=" not in pair:
            raise ValueError(f"The comparator {name!r} has {pair!r} after @; write key=value, for example recall=0.5.")
        set_value(changes, pair)
    if changes and way == EVERY_COMPARATOR:
        raise ValueError(f"The comparator {name!r} names all columns; settings after @ need the name of one.")
    for key in changes:
        if key not in OVERRIDES:
            raise ValueError(
                f"The comparator {name!r} cannot set {key!r} for itself.{describe_choices(key, OVERRIDES)}"
            )
    return way, changes


def trains(name: str) -> bool:
    """Whether a comparator changes more than the scaling of positions."""
    return split_comparator(name)[0] not in UNTRAINED
