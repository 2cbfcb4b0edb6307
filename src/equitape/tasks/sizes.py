"""Checks of sizes that several tasks share, each refused in one sentence, and the share of an evaluation."""

from itertools import pairwise


def require_order(**sizes: float) -> None:
    """Refuse sizes that do not grow in the order in which they are given: tails on either side of what is trained."""
    values = list(sizes.values())
    if any(after <= before for before, after in pairwise(values)):
        given = ", ".join(f"{name} {value}" for name, value in sizes.items())
        raise ValueError(
            f"{given}: these must grow in this order, or the tails would lie inside the training distribution."
        )


def scale_samples(samples: int, budget: float) -> int:
    """How many of the samples a share of the evaluation takes, at least one."""
    if not 0 < budget <= 1:
        raise ValueError(f"budget is {budget}; it is the share of the evaluation to do, more than 0 and at most 1.")
    return max(1, round(samples * budget))
