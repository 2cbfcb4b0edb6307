"""What `equitape extend` chooses where its settings leave something open, and the form of a choice."""

from dataclasses import dataclass
from typing import Any

POLICY: dict[str, Any] = {
    "method": "theta+lora",
    "row_length": 4096,  # at most, and never above the base's context
    "whole_rows": 0.9,  # share of the text that rows of one document must hold; otherwise documents share rows
    "jumps_per_row": 2,
    "jump_shape": "log",
    "batch_size": 8,
    "steps": 500,  # at most
    "passes": 4,  # over the text, at most
    "recall": 0.25,
    "theta_reach": 8,  # times the new context, for NTK's rule
    "query_growth": 0.05,  # where positions are not scaled by YaRN, which makes scores larger itself
    "tape_blocks": 5,  # TAPE updates in the first block and in every fifth after it
    "theta_tokens": 10**6,  # a budget below this keeps NTK's rule for the new context itself
}
"""What is chosen where the settings leave it open. It follows docs/results/extend-smollm2.md and changes with it."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One line of the plan."""

    name: str
    value: str
    reason: str
