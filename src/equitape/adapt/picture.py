"""The loss of a run as a picture."""

from pathlib import Path
from typing import Any

from ..report.plots import COLOURS, figure_of

SMOOTHED_OVER = 0.05
"""Share of the run that a point of the smooth line averages, but no fewer steps than SMOOTHED_STEPS."""
SMOOTHED_STEPS = 5


def draw_loss(lines: list[dict[str, Any]], path: Path) -> None:
    """Loss against tokens seen, with a running mean; nothing is drawn of a run without a step."""
    if not lines:
        return
    tokens = [line["tokens"] / 1e6 for line in lines]
    losses = [line["loss"] for line in lines]
    width = max(min(SMOOTHED_STEPS, len(losses)), round(SMOOTHED_OVER * len(losses)))
    smooth = [
        sum(part) / len(part) for part in (losses[max(0, end - width) : end] for end in range(1, len(losses) + 1))
    ]
    with figure_of(7, 4) as figure:
        axes = figure.subplots()
        axes.plot(tokens, losses, color=COLOURS[0], alpha=0.35, linewidth=0.8, label="each step")
        axes.plot(tokens, smooth, color=COLOURS[0], label=f"mean of {width} steps" if width > 1 else None)
        axes.set_xlabel("tokens, millions")
        axes.set_ylabel("loss, nats a token")
        if width > 1:
            axes.legend()
        aside = path.with_name(f".{path.name}")
        figure.savefig(aside, format="png", dpi=120)
        aside.replace(path)
