"""How wide are the loads and stores of the fused kernels? Compiles them for an H100 or H200, without a GPU.

    python benchmarks/memory_instructions.py

A kernel that is bound by memory should move 16 bytes with every instruction. Masks and addresses can make the compiler
load numbers one by one, which no count of bytes shows. Counts are those of one thread, in the code of the 155M shape in
bfloat16 (12 heads of 64 channels, decay inside the heads), with all frequencies carried and with 8.
"""

import json
import os
import re
from collections import Counter
from typing import Any

# the kernels themselves, not Triton's interpreter
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from equitape.kernels import launch as launches
from equitape.kernels import operator, triton_backward, triton_forward, triton_in_turn, triton_mixing, triton_rotary

TARGET = GPUTarget("cuda", 90, 32)
BATCH, TOKENS, HEADS, DIM = 2, 1024, 12, 64
COLUMNS = 4
"""Of a decay inside the heads."""
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}


def count_instructions(kernel: Any, tensors: Any, launch: launches.Launch) -> dict[str, int]:
    """{"load 16": 12, "store 2": 4, ...}: instructions by their bytes."""
    constants, options = dict(launch.constants), {}
    for name in ("num_warps", "num_stages"):
        if name in constants:
            options[name] = constants.pop(name)
    signature, attributes = {}, {}
    given = [*tensors, *launch.numbers]
    for index, name in enumerate(kernel.arg_names):
        value = given[index] if index < len(given) else constants[name]
        if index >= len(given) or value is None or (not isinstance(value, Tensor) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = POINTERS[value.dtype] if isinstance(value, Tensor) else "i32"
        if isinstance(value, Tensor) or value % 16 == 0:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    code = triton.compile(source, target=TARGET, options=options).asm["ptx"]
    found = re.findall(r"\b(ld|st)\.global(?:\.\w+::\w+)*(?:\.v(\d))?\.(b\d+)", code)
    kinds = {"ld": "load", "st": "store"}
    return dict(Counter(f"{kinds[kind]} {int(times or 1) * BYTES[size]}" for kind, times, size in found))


def count_all() -> dict[str, dict[str, int]]:
    """The instructions of each kernel."""
    counted: dict[str, dict[str, int]] = {}

    def count(kernel: Any, tensors: Any, options: Any, describe: Any) -> None:
        if kernel.__name__ != "sum_kernel":
            frequencies = "all frequencies" if width == DIM else f"{width // 2} frequencies"
            counted[f"{kernel.__name__}, {frequencies}"] = count_instructions(kernel, tensors, describe())

    modules = (triton_backward, triton_forward, triton_in_turn, triton_mixing, triton_rotary)
    for module in modules:
        if hasattr(module, "launch"):
            module.launch = count

    def heads(width: int) -> Tensor:
        return torch.empty(BATCH, TOKENS, HEADS, width, dtype=torch.bfloat16).transpose(1, 2)

    def field(width: int) -> Tensor:
        return torch.empty(BATCH, HEADS, TOKENS, width, dtype=torch.bfloat16)

    query, key, columns = heads(DIM), heads(DIM), field(COLUMNS)
    carry = torch.empty(2, HEADS, HEADS)
    for width in (DIM, 16):
        changed = None if width == DIM else field(width)
        start = field(DIM) if changed is None else torch.empty(1, 1, TOKENS, DIM, dtype=torch.bfloat16)
        operator.fused_rotary(query, key, start, changed, columns, columns, HEADS)
        operator.fused_rotary_backward(query, key, query, key, start.expand_as(field(DIM)), COLUMNS // 2, changed)
        if changed is None:
            mixing = torch.empty(BATCH, TOKENS, 2, HEADS, HEADS, dtype=torch.bfloat16)
            operator.fused_mix(field(width), heads(width), mixing, carry, True)
            operator.fused_mix_backward(field(width), field(width), heads(width), mixing, carry, True, True)
        else:
            gate = torch.empty(BATCH, TOKENS, 4 * HEADS, dtype=torch.bfloat16)
            weights = (gate, carry, torch.empty(2, 4 * HEADS, HEADS), torch.empty(2, HEADS, 4 * HEADS))
            operator.fused_update(field(width), heads(width), *weights, True)
            operator.fused_gradients(field(width), field(width), heads(width), *weights, True, True)
    return counted


if __name__ == "__main__":
    print(json.dumps(count_all(), indent=1))
