"""What the proof measures: lengths, prompts and windows, within the time that there is."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from ..model import EquitapeConfig
from ..scale.costs import ModelCosts
from .estimates import Device
from .settings import ExtendSettings

SHORT = (512, 1024, 2048)
"""Lengths at which a longer context must not cost quality."""
ROW_SECONDS = 120.0
"""Lengths beyond the new context are measured only where one row takes no longer than this by the estimate."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What is measured of every model."""

    short: tuple[int, ...]
    lengths: tuple[int, ...]
    """Long lengths of prompts."""
    needle_lengths: tuple[int, ...]
    text_lengths: tuple[int, ...]
    """Lengths at which perplexity is measured, as far as the held-out text reaches."""
    samples: int
    """Prompts per length."""
    windows: int
    """Pieces per held-out document."""

    def seconds(self, costs: ModelCosts, device: Device, measured: Collection[str]) -> float:
        """An estimate of the time for two models. measured: names of tasks."""
        by_task = {"passkey": self.lengths, "needles": self.needle_lengths}
        prompts = [length for task, lengths in by_task.items() if task in measured for length in lengths]
        rows = self.samples * sum(costs.forward(1, length, logits=1).total for length in prompts)
        longest = max(self.text_lengths)
        texts = sum(
            costs.forward(1, length).total * self.windows * longest / length
            for length in ({*self.short, *self.text_lengths} if "perplexity" in measured else ())
        )
        return 2 * (rows + texts) / device.rate


def choose_proof(
    config: EquitapeConfig,
    settings: ExtendSettings,
    costs: ModelCosts,
    device: Device,
    available: int,
) -> Proof:
    """What the settings ask for, and the rest by default. available: tokens to which the held-out text reaches."""
    context, to = config.context, settings.to
    cheap = costs.forward(1, 2 * to).total / device.rate <= ROW_SECONDS
    lengths = ordered(settings.eval_lengths) or doubled(context, to) + ((2 * to,) if cheap else ())
    text_lengths = reachable(ordered(settings.text_lengths) or lengths, context, to, available)
    return Proof(
        short=tuple(length for length in SHORT if length <= context) or tuple({max(context // 2, 1), context}),
        lengths=lengths,
        needle_lengths=ordered(settings.needle_lengths) or lengths,
        text_lengths=text_lengths,
        samples=settings.samples or (20 if device.kind == "cuda" else 2),
        windows=settings.windows or (4 if device.kind == "cuda" else 1),
    )


def shorten(proof: Proof, settings: ExtendSettings, costs: ModelCosts, device: Device, seconds: float) -> Proof:
    """A proof that takes so many seconds by the estimate, or the shortest with all that the settings ask for."""
    for smaller in reductions(proof, settings):
        if proof.seconds(costs, device, settings.measure) <= seconds:
            break
        proof = smaller(proof)
    return proof


def reductions(proof: Proof, settings: ExtendSettings) -> list[Callable[[Proof], Proof]]:
    """Ways to measure less, first those that cost the proof least. What the settings ask for stays."""
    own = [length for length in proof.text_lengths if length <= settings.to][-1:]
    ways: list[Callable[[Proof], Proof]] = []
    if settings.samples is None:
        ways.append(lambda given: replace(given, samples=1))
    if not settings.eval_lengths:
        ways.append(lambda given: replace(given, lengths=tuple(x for x in given.lengths if x <= settings.to)))
    if not settings.needle_lengths:
        ways.append(lambda given: replace(given, needle_lengths=given.needle_lengths[:1]))
    if not settings.text_lengths:
        ways.append(lambda given: replace(given, text_lengths=(*given.text_lengths[:1], *own)))
    if len(proof.short) > 2:
        ways.append(lambda given: replace(given, short=(given.short[0], given.short[-1])))
    if not settings.text_lengths:
        ways.append(lambda given: replace(given, text_lengths=tuple(own)))
    if not settings.eval_lengths:
        ways.append(lambda given: replace(given, lengths=(settings.to,)))
    if not settings.needle_lengths:
        ways.append(lambda given: replace(given, needle_lengths=(min(max(given.short), settings.to),)))
    return ways


def ordered(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Each length once, the shortest first."""
    return tuple(sorted(set(lengths)))


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


def listed(lengths: Iterable[int]) -> str:
    """Lengths in one line."""
    return ", ".join(f"{length:,}" for length in lengths)
