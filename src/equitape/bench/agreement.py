"""Compare every run with a reference before timing it, so that no wrong result is timed.

The reference uses the same weights and inputs, rounded to the timed dtype. It computes in higher precision with
unfused attention and kernels, uncompiled. A run may have twice the error of unfused attention in the timed dtype.
Errors are relative norms of differences.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..runs.errors import is_out_of_memory
from .measure import free_memory
from .subjects import LLAMA
from .workloads import Case, Outputs, PreparedRun, Variant, build

SMALLEST = 64
# memory of the scores of one layer, of which a reference holds several copies at once
SCORE_BYTES = {"cuda": 8 * 2**30, "cpu": 2**28}
# a tolerance above this would prove nothing
MOST_ALLOWED = 0.25


class DisagreementError(Exception):
    """The outputs differ from the reference's."""


def checked_run(case: Case, variant: Variant) -> tuple[PreparedRun, str]:
    """Prepare a case and check that its outputs agree with the reference. Adds a note if a smaller size was compared.

    The size is reduced if the reference does not fit in memory: first fewer sequences, then shorter ones.
    Raises DisagreementError.
    """
    size, expected, allowed = _reference(case)
    prepared = build(size, variant)
    complaints = compare(prepared.outputs(), expected, allowed)
    if complaints:
        raise DisagreementError("; ".join(complaints))
    if size == case:
        return prepared, ""
    del prepared, expected
    free_memory()
    return build(case, variant), f"compared at {size.batch} x {size.length}"


def _reference(case: Case) -> tuple[Case, Outputs, dict[str, float]]:
    """The size that fits, the reference's outputs at that size, and the allowed error of each output."""
    size = case
    while score_bytes(size) > SCORE_BYTES[case.device.type] and smaller(size) != size:
        size = smaller(size)
    precise = torch.float64 if case.dtype == torch.float32 else torch.float32
    while True:
        try:
            with plain_kernels():
                expected = build(size, Variant(attention="eager", dtype=precise)).outputs()
                plain = build(size, Variant(attention="eager", dtype=case.dtype)).outputs()
            break
        except RuntimeError as error:
            if not is_out_of_memory(error) or smaller(size) == size:
                raise
        # here the error, and the tensors its frames held, are released
        free_memory()
        size = smaller(size)
    # an output is rounded once at the end, in any implementation
    rounding = torch.finfo(case.dtype).eps / 2
    if case.subject.kind in (LLAMA, "fla-rope"):
        # these form angles in float32, we in float64
        rounding += size.length * torch.finfo(torch.float32).eps
    allowed = {name: min(2 * distance(plain[name], expected[name]), MOST_ALLOWED) + rounding for name in expected}
    return size, expected, allowed


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Use plain PyTorch instead of our kernels, on any device."""
    before = os.environ.get("EQUITAPE_KERNELS")
    os.environ["EQUITAPE_KERNELS"] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ["EQUITAPE_KERNELS"]
        else:
            os.environ["EQUITAPE_KERNELS"] = before


def score_bytes(case: Case) -> int:
    """Memory of one layer's attention scores in the reference."""
    queries = 1 if case.measure == "decode" else case.length
    width = 8 if case.dtype == torch.float32 else 4
    if case.subject.kind == "fla-path":
        # every block of keys keeps the queries and two products besides the scores
        width *= 4
    return case.batch * case.shape.num_heads * queries * case.length * width


def smaller(case: Case) -> Case:
    """Half the batch, or half the length of a single sequence; unchanged if that is already short."""
    if case.batch > 1:
        return replace(case, batch=case.batch // 2)
    return replace(case, length=max(min(case.length, SMALLEST), case.length // 2))


def compare(found: Outputs, expected: Outputs, allowed: dict[str, float]) -> list[str]:
    """One sentence per output that is missing or too far off; NaN is too far off."""
    complaints = []
    for name, tensors in expected.items():
        if name not in found or [each.shape for each in found[name]] != [each.shape for each in tensors]:
            complaints.append(f"{name}: missing or of a different shape")
            continue
        error = distance(found[name], tensors)
        if not error <= allowed[name]:
            complaints.append(f"{name}: off by {error:.1e}, allowed {allowed[name]:.1e}")
    return complaints


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference over the norm of the expected tensors, all taken as one vector."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    norm = sum(float(each.double().square().sum()) for each in expected)
    return (difference / norm) ** 0.5 if norm else float("inf") if difference else 0.0
