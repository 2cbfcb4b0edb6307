"""The proof: a model measured before and after on the same text and prompts, and the verdict on both."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.nn.functional import log_softmax

from ..data.tokens import TokenStore
from ..evaluation.runner import REPORT, SETTINGS, evaluate
from ..report.numbers import number
from ..runs.extension import EXTENDED, ORIGINAL, RETRIEVAL, Agreement, Check, Verdict, perplexities, scores
from ..runs.files import read_json
from ..runs.identity import holds_nothing
from ..runs.results import EvaluationReport
from ..tasks import build_evaluation
from ..tasks.evaluated_model import EvaluatedModel
from ..tasks.haystack import PromptMaker
from ..tasks.needles import HaystackTask
from ..tasks.perplexity import CHUNK_TOKENS
from .last_words import NAME
from .lengths import listed
from .plan import ExtensionPlan
from .settings import ExtendSettings

AGREEMENT_WINDOWS, FEW_WINDOWS = 8, 2
"""On a GPU and elsewhere."""
QUESTIONS, FEW_QUESTIONS = 200, 50
"""Of the task of lm-eval, on a GPU and elsewhere."""
FEWEST_QUESTIONS = 10
HARNESS = "lm-eval"
PLACES = ("options.include_path",)
"""Settings of the harness that only say where the extension lies; its text decides the questions."""
SHARES = ("acc", "exact_match")
"""Metrics of the harness, by the start of their names, that are shares of right answers."""

Reports = dict[str, EvaluationReport]
"""By task."""


def proof_tasks(
    plan: ExtensionPlan, settings: ExtendSettings, tokenizer: Any
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The options of every task of the proof, and notes on what is left out."""
    tasks: dict[str, dict[str, Any]] = {
        "perplexity": {
            "data": settings.eval_data,
            "lengths": tuple(sorted({*plan.short, *plan.text_lengths})),
            "short": min(plan.short),
            "windows": plan.windows,
            "join": plan.join,
        }
    }
    depths = [round(index / (plan.depths - 1), 3) for index in range(plan.depths)] if plan.depths > 1 else [0.5]
    prompts: dict[str, dict[str, Any]] = {
        "passkey": {"depths": tuple(map(float, depths)), "samples": plan.samples // plan.depths, "seed": settings.seed},
        "needles": {"kinds": ("multikey",), "samples": plan.samples, "seed": settings.seed},
    }
    notes = []
    wanted = {"passkey": plan.lengths, "needles": plan.needle_lengths}
    for name, options in prompts.items():
        if name not in settings.measure:
            continue
        fitting = fitting_lengths(name, options, tokenizer, wanted[name])
        left_out = [length for length in wanted[name] if length not in fitting]
        if left_out:
            notes.append(
                f"{RETRIEVAL[name]}: not measured at {listed(left_out)} tokens, which do not hold a whole prompt."
            )
        if fitting:
            tasks[name] = {**options, "lengths": fitting, "short": fitting[0]}
    return {name: options for name, options in tasks.items() if name in settings.measure}, notes


def harness_task(settings: ExtendSettings, questions: int, passages: int) -> tuple[dict[str, Any] | None, list[str]]:
    """The options of the task of lm-eval, None where it is not measured, and notes on why.

    passages: how many there are of the held-out text.
    """
    if HARNESS not in settings.measure:
        return None, []
    if find_spec("lm_eval") is None:
        return None, ['No task of lm-eval is measured: it is not installed (pip install "equitape[eval]").']
    if settings.harness is None and passages < FEWEST_QUESTIONS:
        return None, ["No task of lm-eval is measured: the held-out text is too short to ask for last words."]
    return {"task": f"{HARNESS}:{settings.harness or NAME}", "limit": questions, "batch_size": 8}, []


def check_harness_task(settings: ExtendSettings) -> None:
    """Raise ValueError if the given task of lm-eval, its data or lm-eval itself is missing."""
    if settings.harness is not None:
        build_evaluation(f"{HARNESS}:{settings.harness}", {}).check_data()


def fitting_lengths(name: str, options: dict[str, Any], tokenizer: Any, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths that hold every prompt of a task."""
    task = build_evaluation(name, options)
    assert isinstance(task, HaystackTask)
    task.maker = PromptMaker(tokenizer, task.options.filler)
    return tuple(length for length in lengths if task.need(length)[0] <= length)


def measure(
    load: Any,
    tasks: dict[str, dict[str, Any]],
    folder: Path,
    batch_tokens: int | None = None,
    console: Console | None = None,
) -> tuple[Reports, EvaluatedModel | None]:
    """The reports of a model on all tasks, and the model if it had to be loaded.

    Finished tasks are read from the folder. load: gives the model. batch_tokens: evaluated at a time.
    """
    reports: Reports = {}
    evaluated: EvaluatedModel | None = None
    for name, given in tasks.items():
        out = folder / name
        report = read_report(out)
        if report is None:
            evaluated = evaluated or load()
            options = dict(given)
            task = build_evaluation(options.pop("task", name), options)
            evaluate(evaluated, task, out, resume=True, batch_tokens=batch_tokens, ignored=PLACES, console=console)
            report = EvaluationReport.read(out / REPORT)
        reports[name] = report
    return reports, evaluated


def read_report(out: Path) -> EvaluationReport | None:
    """The report of a finished evaluation; None where it is to be made, also in place of a damaged one."""
    if not isinstance(read_json(out / SETTINGS), dict) and not holds_nothing(out):
        raise ValueError(f"{out / SETTINGS} is missing or damaged; delete {out}, and --resume measures that again.")
    try:
        return EvaluationReport.read(out / REPORT)
    except ValueError:
        # the answers are kept, so only the scores are made again
        return None


@torch.no_grad()
def agree(original: Any, other: Any, store: TokenStore, length: int, windows: int) -> Agreement:
    """Compare the predictions of two models on the first windows of a text."""
    tokens = store.joined()
    count = max(1, min(windows, len(tokens) // length))
    same = total = 0
    divergence = 0.0
    for index in range(count):
        row = tokens[index * length : (index + 1) * length][None]
        one, two = (model(input_ids=row.to(model.device), use_cache=False).logits[0] for model in (original, other))
        for first, second in zip(one.split(CHUNK_TOKENS), two.split(CHUNK_TOKENS), strict=True):
            p, q = log_softmax(first.float(), -1), log_softmax(second.float(), -1)
            divergence += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            total += len(p)
    return Agreement(length=length, tokens=total, agreement=100 * same / total, kl=divergence / total)


def judge(
    settings: ExtendSettings,
    context: int,
    short: tuple[int, ...],
    reports: dict[str, Reports],
    training: dict[str, Any],
) -> Verdict:
    """Success, or what got worse. Without a trained model, the note of the training is the reason."""
    if training["status"] != "done":
        note = training["note"] or f"training ended with the status {training['status']!r}."
        checks = [Check(name="training", passed=False, sentence=note)]
    else:
        before, after = reports[ORIGINAL], reports[EXTENDED]
        if "perplexity" in before:
            checks = [*check_short(settings, short, before, after), *check_long(settings, context, before, after)]
        else:
            note = "perplexity was not measured, so what the change cost at short lengths is unknown."
            checks = [Check(name="perplexity", passed=False, sentence=note)]
        for task in RETRIEVAL:
            if task in before:
                checks += check_retrieval(settings, context, task, before[task], after[task])
        if HARNESS in before:
            checks += check_harness(settings, before[HARNESS], after[HARNESS])
    failed = [check for check in checks if not check.passed]
    if failed:
        more = f" {len(failed) - 1} more of {len(checks)} checks failed." if len(failed) > 1 else ""
        return Verdict(success=False, sentence=f"Not a success: {failed[0].sentence}{more}", checks=checks)
    return Verdict(success=True, sentence=describe_success(settings.to, context, len(checks), reports), checks=checks)


def describe_success(to: int, context: int, checks: int, reports: dict[str, Reports]) -> str:
    """The verdict on a success, which claims no length beyond the longest measured one."""
    after = reports[EXTENDED]
    text = {length for lengths in perplexities(after["perplexity"]).values() for length in lengths if length <= to}
    prompts = {length for task in RETRIEVAL if task in after for length in scores(after[task]) if length <= to}
    longest = max(text | prompts)
    if longest < to:
        return (
            f"Success up to {longest:,} tokens instead of {context:,}: all {checks} checks passed. Nothing between "
            f"there and the new context, {to:,}, was measured."
        )
    reach = "" if max(text) == to else f" Perplexity was measured up to {max(text):,} tokens."
    return (
        f"Success: the model now reads {to:,} tokens instead of {context:,}, and all {checks} checks passed.{reach}"
        f"{found_at(to, reports)}"
    )


def found_at(length: int, reports: dict[str, Reports]) -> str:
    """A sentence on the passkey at the new length: reading text is not yet finding things in it."""
    both = [reports[model].get("passkey") for model in (ORIGINAL, EXTENDED)]
    was, now = (scores(report).get(length) if report is not None else None for report in both)
    if was is None or now is None:
        return ""
    return f" Passkey at {length:,} tokens: {number(was, 1)} % before, {number(now, 1)} % after."


def check_short(settings: ExtendSettings, short: tuple[int, ...], before: Reports, after: Reports) -> list[Check]:
    """Perplexity at short lengths, against the original's at the same length."""
    checks = []
    later = perplexities(after["perplexity"])
    for text, values in perplexities(before["perplexity"]).items():
        for length in short:
            checks.append(compare(f"short: {text} at {length}", values.get(length), later[text].get(length), settings,
                                  f"perplexity of {text} at {length:,} tokens"))  # fmt: skip
    return checks


def check_long(settings: ExtendSettings, context: int, before: Reports, after: Reports) -> list[Check]:
    """Perplexity at the longest length up to the new context, against the original's best inside its own context."""
    checks = []
    later = perplexities(after["perplexity"])
    for text, values in perplexities(before["perplexity"]).items():
        longest = max(length for length in values if length <= settings.to)
        own = max(length for length in values if length <= context)
        words = f"perplexity of {text} at {longest:,} tokens, against the original's at {own:,},"
        checks.append(compare(f"long: {text} at {longest}", values.get(own), later[text].get(longest), settings, words))
    return checks


def compare(name: str, was: float | None, now: float | None, settings: ExtendSettings, words: str) -> Check:
    """Whether a perplexity stayed within the tolerance; a missing one did not."""
    limit = settings.tolerance
    if was is None or now is None:
        return Check(name=name, passed=False, sentence=f"{words} could not be measured.")
    passed = now <= limit * was
    verb = "stayed within" if passed else "rose above"
    sentence = f"{words} {verb} {limit:g} times the original's: {number(was)} before, {number(now)} after."
    return Check(name=name, passed=passed, sentence=sentence)


def check_retrieval(
    settings: ExtendSettings, context: int, task: str, before: EvaluationReport, after: EvaluationReport
) -> list[Check]:
    """Mean scores inside the base's context, and from there up to the new one."""
    was, now = scores(before), scores(after)
    parts = {
        f"up to {context:,} tokens": [length for length in was if length <= context],
        f"from {context:,} to {settings.to:,} tokens": [length for length in was if context < length <= settings.to],
    }
    checks = []
    for where, lengths in parts.items():
        known = [(was[length], now.get(length)) for length in lengths if was[length] is not None]
        if not known:
            continue
        # what the extended model could not answer counts as wrong
        old, new = (sum(float(pair[side] or 0.0) for pair in known) / len(known) for side in (0, 1))
        passed = new >= old - settings.retrieval_tolerance
        checks.append(
            Check(
                name=f"{task}: {where}",
                passed=passed,
                sentence=f"{RETRIEVAL[task]} {where} {'did not fall' if passed else 'fell'} by more than "
                f"{settings.retrieval_tolerance:g} points: {number(old, 1)} before, {number(new, 1)} after.",
            )
        )
    return checks


def check_harness(settings: ExtendSettings, before: EvaluationReport, after: EvaluationReport) -> list[Check]:
    """The first metric of lm-eval's task that is a share of right answers."""
    shares = [name for name in before.metrics if name.split()[-1].startswith(SHARES) and "stderr" not in name]
    was, now = (report.metrics.get(shares[0]) if shares else None for report in (before, after))
    if was is None or now is None:
        return []
    name = shares[0]
    old, new = 100 * was, 100 * now
    passed = new >= old - settings.retrieval_tolerance
    verb = "did not fall" if passed else "fell"
    sentence = (
        f"{name} of lm-eval {verb} by more than {settings.retrieval_tolerance:g} points: {number(old, 1)} before, "
        f"{number(new, 1)} after."
    )
    return [Check(name=f"{HARNESS}: {name}", passed=passed, sentence=sentence)]
