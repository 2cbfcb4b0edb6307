"""equitape demo."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .options import keeping

if TYPE_CHECKING:
    from ..training.plan import Plan


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights and data. Default: the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results and report. Default: runs/demo.")] = None,
) -> None:
    """Train a few encodings on small additions, compare them and solve a few sums. Takes minutes on two CPU cores.

    This is `equitape compare demo`: finished runs are not repeated.
    """
    from ..report import write_report
    from ..training.compare import compare, describe_kept
    from ..training.plan import make_plan
    from ..training.recipe import load_recipe
    from ..training.show import show_results

    overrides = {"train.steps": steps, "seeds": None if seed is None else f"[{seed}]"}
    changed = {key: value for key, value in overrides.items() if value is not None}
    suffix = "".join(
        f"-{key.split('.')[-1]}{value}".replace("[", "").replace("]", "") for key, value in changed.items()
    )
    out = out or Path(f"runs/demo{suffix}")
    console = Console()
    plan = make_plan(load_recipe("demo", [f"{key}={value}" for key, value in changed.items()]))
    console.print(escape(plan.recipe.description))
    with keeping(lambda: describe_kept(plan, out), resume=False):
        # models this small train faster on one thread than on two
        results = compare(plan, out, jobs=2, console=console)
        write_report(results, out)
    show_results(results, console)
    answer_sums(plan, out, console)
    console.print(
        "One seed and one small model: a demonstration, not evidence. For full experiments, run equitape recipes."
    )


def answer_sums(plan: "Plan", out_dir: Path, console: Console) -> None:
    """Solve a few sums with `generate`, the last one longer than any in training."""
    import torch

    from ..model import EquitapeForCausalLM
    from ..tasks import addition
    from ..training.compare import run_folder
    from ..training.fit import MODEL, without_bars

    models = {}
    for choice, seed in plan.runs:
        folder = run_folder(out_dir, choice.label, seed) / MODEL
        if folder.is_dir():
            with without_bars():
                models[choice.label] = EquitapeForCausalLM.from_pretrained(folder).eval()
    trained = plan.recipe.task["trained_digits"]
    generator = torch.Generator().manual_seed(0)
    for digits in (trained - 1, trained, trained, trained + 1):
        low, high = 10 ** (digits - 1), 10**digits
        left, right = (int(torch.randint(low, high, (), generator=generator)) for _ in range(2))
        answers = []
        for label, model in models.items():
            tokens = addition.greedy_answers(model, addition.encode(left, right), digits + 2)
            answer = addition.decode(tokens[0])
            colour = "green" if answer == str(left + right) else "red"
            answers.append(f"{escape(label)} [{colour}]{answer}[/{colour}]")
        note = " (longer than in training)" if digits > trained else ""
        console.print(f"  {left} + {right} = {left + right}:  {',  '.join(answers)}{note}")
