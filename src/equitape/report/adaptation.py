"""The training-loss plot of a fine-tuning run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runs.files import write_bytes
from .charts import Line, LinePanel, line_plot
from .numbers import number
from .style import SeriesStyle, series_styles

SMOOTHED_SHARE, SMOOTHED_STEPS = 0.05, 5
"""The running mean averages this fraction of the run, and at least this many steps."""


def write_loss(lines: Sequence[dict[str, Any]], path: Path, kind: str | None = None) -> None:
    """Write a PNG file of loss against tokens seen: every step and a running mean; nothing for a run without steps.

    lines: of log.jsonl. kind: the encoding, for its colour.
    """
    steps = [line for line in lines if line.get("loss") is not None]
    if not steps:
        return
    tokens = [line["tokens"] / 1e6 for line in steps]
    losses = [float(line["loss"]) for line in steps]
    width = max(min(SMOOTHED_STEPS, len(losses)), round(SMOOTHED_SHARE * len(losses)))
    smooth = [
        sum(part) / len(part) for part in (losses[max(0, end - width) : end] for end in range(1, len(losses) + 1))
    ]
    style = series_styles({"loss": kind})["loss"]
    shown = [Line(label="each step", style=SeriesStyle(colour="#b0b0b0"), x=tokens, y=losses)]
    if width > 1:
        plain = SeriesStyle(colour=style.colour)
        shown.append(Line(label=f"mean of {width} steps", style=plain, x=tokens, y=smooth))
    panel = LinePanel(x_label="tokens, millions", y_label="loss, nats per token", lines=shown, x_log=False)
    alt = f"Line plot of training loss against tokens seen, from {number(smooth[0])} to {number(smooth[-1])}."
    write_bytes(path, line_plot("loss", "Training loss", [panel], alt=alt).png)
