"""Write benchmarks/layer_counts.json: operations, bytes and launches of one attention layer for many encodings.

tests/bench/test_counts.py compares the file with the code. Run this after a change that is meant to change the work of
a layer, and look at the difference:

    python benchmarks/layer_counts.py && git diff benchmarks/layer_counts.json
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equitape.bench.measure import count_operations
from equitape.bench.shapes import SHAPES
from equitape.bench.workloads import MEASURES, Case, Variant, build

FILE = Path(__file__).with_suffix(".json")
COUNTED = (
    "rope", "nope", "xpos", "alibi", "fox", "t5", "fire", "cope",
    "rope rotate_values=1", "tape", "tape layers=[]", "tape2", "tape2 move=true decay_inside=false",
    "tape2 carried_frequencies=2", "tape2 rotate_values=0.5",
    "tape-paper",
)  # fmt: skip
"""Encodings in the table; those with a state update it in this layer, where their options allow."""
SHAPE, BATCH, LENGTH = "tiny", 2, 32


class CountingMode(TorchDispatchMode):
    """Counts calls of torch's operators that run a kernel, and the bytes of the tensors that these read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_free(func):
            self.launches += 1
            # each once: an operator in place returns its argument
            found = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
            self.bytes += sum(map(_size, found.values()))
        return result


def _is_free(func: Any) -> bool:
    """Whether an operator only names or allocates memory."""
    name = func.name()
    return func.is_view or name.startswith(("aten::empty", "aten::_unsafe_view", "aten::lift_fresh", "prim"))


def _size(tensor: Tensor) -> int:
    """Bytes of the memory behind a tensor; an expanded axis is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


def count_layer(encoding: str, measure: str) -> dict[str, Any]:
    """Operations, bytes and launches of one attention layer on the CPU in float32, with torch's fused attention."""
    case = Case(
        measure=measure, encoding=encoding, shape=SHAPES[SHAPE], batch=BATCH, length=LENGTH, dtype=torch.float32,
        device=torch.device("cpu"), input_sets=1,
    )  # fmt: skip
    prepared = build(case, Variant(dtype=case.dtype))
    with CountingMode() as counted:
        prepared.call(0)
    return {
        "encoding": encoding,
        "measure": measure,
        "operations": count_operations(case),
        "bytes": counted.bytes,
        "launches": counted.launches,
    }


def count_layers() -> dict[str, Any]:
    """The committed table."""
    about = {"shape": SHAPE, "batch": BATCH, "length": LENGTH, "torch": minor_version()}
    rows = [count_layer(encoding, measure) for encoding in COUNTED for measure in MEASURES["attention"]]
    return {**about, "layers": rows}


def minor_version() -> str:
    """torch's version without its patch; another one may split an operator into others."""
    return ".".join(torch.__version__.split(".")[:2])


if __name__ == "__main__":
    table = count_layers()
    rows = ",\n".join("    " + json.dumps(row) for row in table.pop("layers"))
    FILE.write_text(json.dumps(table)[:-1] + ', "layers": [\n' + rows + "\n]}\n")
    print(f"Written to {FILE}.")
