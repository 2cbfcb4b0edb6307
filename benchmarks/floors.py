"""The least that TAPE can cost next to RoPE on one H200, by counted operations and bytes.

    python benchmarks/floors.py

RoPE's time is measured. A layer that updates the field adds at least three things: attention with a value twice as
wide, the bytes of the field and of the gates' features at the rate of a copy, and, in a decoding step, two kernels. All
other work is taken to be free. Attention costs what cuDNN charges for the wide value: measured, since it is not what
the operations say (1.5 times forward and 1.4 with backward).

Where the field has a place inside the value's width, attention adds nothing and a quarter of the field is moved.
"""

from typing import Literal, NamedTuple

from equitape.bench.shapes import SHAPES
from equitape.encodings.tape import updating_blocks

COPY = 4.26e12
"""Bytes per second of a large copy (results/2026-11-16-h200-field-update.json)."""
KERNELS = 4.0e-6
"""Seconds of the update and of the copy of the token part for one token (README.md, a decoding step)."""
SIZE = 2
"""Bytes of a number."""


class Case(NamedTuple):
    """A case of the benchmarks, with RoPE's time in ms and that of attention in us per layer, plain and wide."""

    shape: str
    batch: int
    length: int
    kind: Literal["train", "prefill", "decode"]
    rope: float
    plain: float = 0.0
    wide: float = 0.0


CASES = (
    # results/2026-11-17-h200-kernels.txt
    Case("155m", 16, 1024, "train", 34.8, 364, 510),
    Case("155m", 16, 1024, "prefill", 9.77, 84, 118),
    # results/2026-11-15-h200-smollm2-and-lengths.txt and 2026-11-18-h200-smollm2-kernels.txt
    Case("smollm2-135m", 4, 4096, "train", 58.5, 0, 320),
    Case("smollm2-135m", 4, 4096, "prefill", 14.8, 196, 281),
    # README.md, heads of 128
    Case("1.1b", 2, 4096, "train", 117.2, 1005, 2115),
    Case("1.1b", 2, 4096, "prefill", 36.1, 256, 442),
    Case("155m", 1, 1024, "decode", 0.573),
    Case("155m", 8, 1024, "decode", 0.642),
    Case("155m", 64, 1024, "decode", 1.167),
    Case("155m", 1, 16384, "decode", 0.718),
)


def layer_seconds(case: Case, inside: bool) -> float:
    """What one updating layer adds. inside: a quarter of the frequencies is carried inside the value's width."""
    shape = SHAPES[case.shape]
    heads, groups, share = shape.num_heads, shape.num_kv_heads, 0.25 if inside else 1.0
    if case.kind == "decode":
        cached = 0 if inside else case.batch * case.length * groups * shape.head_dim * SIZE
        return cached / COPY + KERNELS
    # in fields of one head: the wide value written, its token part copied for the projection, the update
    fields = 4 * groups + 2 * heads + (heads + 2 * groups)
    features = 1
    if case.kind == "train":
        # the update's backward, both gradients joined for attention's, the field's gradients summed, the rotation
        fields += (3 * groups + 2 * heads) + 4 * heads + 4 * groups + 2 * groups
        # read for the gradient of the gates' weight; their own gradient read and written
        features += 3
    numbers = share * fields * shape.head_dim + features * shape.hidden_size
    attention = 0.0 if inside else 1e-6 * (case.wide - case.plain)
    return attention + case.batch * case.length * numbers * SIZE / COPY


def floor(case: Case, layers: int, inside: bool = False) -> float:
    """The least ratio to RoPE's time with so many updating layers."""
    return 1 + 1e3 * layers * layer_seconds(case, inside) / case.rope


def main() -> None:
    """Print a table. The last block never updates."""
    names = ["all blocks", "every second", "first block and middle third", "every fifth"]
    names += ["all, a quarter inside the value"]
    print(f"| case | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for case in CASES:
        blocks = SHAPES[case.shape].num_layers
        geometry = SHAPES[case.shape].config("tape", "sdpa", case.length).geometry
        updating = (blocks - 1, blocks // 2, len(updating_blocks("first_and_middle", geometry)), blocks // 5)
        ratios = [*(floor(case, layers) for layers in updating), floor(case, blocks - 1, inside=True)]
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {case.kind}, {case.shape}, {case.batch} x {case.length} | {cells} |")


if __name__ == "__main__":
    main()
