"""The demo: the recipe of that name compared, then a few sums answered by the models it trained."""

from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from .model import EquitapeForCausalLM
from .report import write_report
from .runs.results import Comparison
from .tasks import addition
from .training.bars import without_bars
from .training.compare import compare, run_folder
from .training.fit import MODEL
from .training.plan import Plan, make_plan
from .training.recipe import load_recipe
from .training.show import show_results

RECIPE = "demo"


def run_demo(overrides: list[str], out_dir: Path, console: Console) -> Comparison:
    """Train, compare, answer; returns what results.json holds."""
    plan = make_plan(load_recipe(RECIPE, overrides))
    console.print(escape(plan.recipe.description))
    # one thread each is faster than two for one so small
    results = compare(plan, out_dir, jobs=2, console=console)
    write_report(results, out_dir)
    show_results(results, console)
    answer_sums(plan, out_dir, console)
    console.print(
        "One seed and one small model: a demonstration, not a finding. Recipes that ask the question properly: "
        "equitape compare --help."
    )
    return results


def answer_sums(plan: Plan, out_dir: Path, console: Console) -> None:
    """A few sums answered by `generate`, the last one longer than any in training."""
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
        told = " (longer than in training)" if digits > trained else ""
        console.print(f"  {left} + {right} = {left + right}:  {',  '.join(answers)}{told}")
