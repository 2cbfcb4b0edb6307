"""Time the update of TAPE's field: plain PyTorch, plain PyTorch compiled, and the fused kernels.

    python benchmarks/field_update.py --output field_update.json
    python benchmarks/field_update.py --complex --normalize --warps 4 2 1 --fused    # as tape2 has it, smaller programs

For every size the result and gradients of the fused kernels are first compared with the plain version's; kernels that
differ, or that do not support a size, are not timed. Bytes are the fewest the update can move: every input read once,
every output written once. Rates are next to that of a copy from device memory to device memory, measured in the same
run.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from equitape.kernels import (
    launch,
    reference,
    triton_backward,
    triton_field,
    triton_forward,
    triton_mixing,
    update_field,
)

WARM_UP, REPEATS, SETS = 10, 30, 4
# programs that share a processor, next to where the warps of a program are set
PROGRAMS = (
    (triton_backward, "PROGRAMS_PER_PROCESSOR", triton_field),
    (triton_forward, "PROGRAMS_PER_PROCESSOR", triton_field),
    (triton_mixing, "FORWARD_PROGRAMS", triton_mixing),
    (triton_mixing, "BACKWARD_PROGRAMS", triton_mixing),
)
USUAL_WARPS = {module: module.WARPS for module in (triton_field, triton_mixing)}
USUAL_PROGRAMS = [getattr(module, name) for module, name, _ in PROGRAMS]
NAMES = ("field", "attended", "gate", "carry", "mix_in", "mix_out")
# batch, tokens, groups, heads, head dimension
SIZES = {
    "155M": (16, 1024, 12, 12, 64),
    "SmolLM2": (4, 4096, 3, 9, 64),
    "1.1B": (4, 4096, 16, 16, 128),
}
MORE_SIZES = {
    "Llama-3-8B": (2, 8192, 8, 32, 128),
    "32 heads": (2, 8192, 32, 32, 128),
}


def make_inputs(size: tuple[int, ...], dtype: torch.dtype, parts: int, seed: int) -> list[Tensor]:
    """Leaves in the order of NAMES; the attended field is a transposed slice, as attention leaves it."""
    batch, tokens, groups, heads, dim = size
    gates = 4 * groups
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device="cuda", generator=generator)).to(dtype)

    complexity = (2,) if parts == 2 else ()
    tensors = [
        draw(batch, groups, tokens, dim),
        draw(batch, tokens, heads, 2 * dim)[..., dim:].transpose(1, 2),
        draw(batch, tokens, gates),
        draw(*complexity, groups, heads, scale=heads**-0.5),
        draw(*complexity, gates, groups, scale=groups**-0.5),
        draw(*complexity, groups, gates, scale=gates**-0.5),
    ]
    return [tensor.detach().requires_grad_() for tensor in tensors]


def num_bytes(tensors: list[Tensor]) -> tuple[int, int]:
    """Fewest bytes moved forward (inputs, result) and backward (inputs, gradients of the result and of inputs)."""
    inputs = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    result = tensors[0].numel() * tensors[0].element_size()
    return inputs + result, 2 * inputs + result


def set_warps(warps: int | None) -> None:
    """Give every program so many warps, and processors as many warps as before; None for those of the package."""
    for module, usual in USUAL_WARPS.items():
        module.WARPS = warps or usual
    for (module, name, holder), programs in zip(PROGRAMS, USUAL_PROGRAMS, strict=True):
        setattr(module, name, programs * USUAL_WARPS[holder] // holder.WARPS)
    launch._kept.clear()


def milliseconds(calls: list[Callable[[], object]]) -> float:
    """Median over REPEATS, each call with its own inputs, so that none finds them in the cache."""
    for index in range(WARM_UP):
        calls[index % len(calls)]()
    times = []
    for index in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # keeps the device busy while the host prepares the launches that are timed
        torch.cuda._sleep(20_000_000)
        begin.record()
        calls[index % len(calls)]()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes per second read and written by a copy of 1 GiB."""
    source = torch.randint(-100, 100, (2**30,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds([lambda: target.copy_(source)]) * 1e-3)


def differ(plain: list[Tensor], fused: list[Tensor], allowed: float) -> str:
    """Which of the result and the gradients are off by more than allowed, relative to their norms."""
    found = []
    for name, one, other in zip(("result", *NAMES), plain, fused, strict=True):
        error = ((one.double() - other.double()).norm() / one.double().norm()).item()
        if not error <= allowed:
            found.append(f"{name} by {error:.1e}")
    return ", ".join(found)


def gradients_of(
    function: Callable[..., Tensor], tensors: list[Tensor], slope: Tensor, normalize: bool
) -> list[Tensor]:
    result = function(*tensors, normalize)
    return [result, *torch.autograd.grad(result, tensors, slope)]


def measure(
    name: str,
    size: tuple[int, ...],
    dtype: torch.dtype,
    parts: int,
    normalize: bool,
    copy: float,
    several_warps: Sequence[int] = (),
    only_fused: bool = False,
) -> list[dict]:
    """One row for each version of the update. only_fused: only the fused kernels, compiled as in a compiled model."""
    sets = [make_inputs(size, dtype, parts, seed) for seed in range(SETS)]
    slopes = [torch.randn_like(tensors[0]) for tensors in sets]
    sizes = {f", {warps} warps": warps for warps in several_warps} or {"": None}
    versions: list[tuple[str, int | None, Callable[..., Tensor]]]
    if only_fused:
        compiled = torch.compile(update_field, fullgraph=True)
        versions = [(f"fused, compiled{name}", warps, compiled) for name, warps in sizes.items()]
    else:
        versions = [
            ("plain", None, reference.update_field),
            ("plain, compiled", None, torch.compile(reference.update_field, fullgraph=True)),
            *((f"fused{name}", warps, update_field) for name, warps in sizes.items()),
        ]
    plain = gradients_of(reference.update_field, sets[0], slopes[0], normalize)
    forward_bytes, backward_bytes = num_bytes(sets[0])
    rows = []
    for version, warps, function in versions:
        torch.compiler.reset()
        if version.startswith("fused"):
            set_warps(warps)
            try:
                fused = gradients_of(function, sets[0], slopes[0], normalize)
            except ValueError as error:
                print(f"{name}: {version} is not timed: {error}")
                continue
            wrong = differ(plain, fused, 1e-4 if dtype == torch.float32 else 3e-2)
            if wrong:
                print(f"{name}: {version} differs from plain PyTorch, so it is not timed: {wrong}")
                continue

        def forward(tensors: list[Tensor], function: Callable[..., Tensor] = function) -> Tensor:
            with torch.no_grad():
                return function(*tensors, normalize)

        forward_time = milliseconds([lambda t=tensors: forward(t) for tensors in sets])
        both_time = milliseconds(
            [
                lambda t=tensors, s=slope, f=function: gradients_of(f, t, s, normalize)
                for tensors, slope in zip(sets, slopes, strict=True)
            ]
        )
        row = {
            "size": name,
            "batch, tokens, groups, heads, dim": size,
            "dtype": str(dtype).removeprefix("torch."),
            "complex": parts == 2,
            "normalize": normalize,
            "version": version,
            "forward ms": forward_time,
            "forward and backward ms": both_time,
            "forward bytes": forward_bytes,
            "forward and backward bytes": forward_bytes + backward_bytes,
            "forward share of copy rate": forward_bytes / (forward_time * 1e-3) / copy,
            "forward and backward share of copy rate": (forward_bytes + backward_bytes) / (both_time * 1e-3) / copy,
        }
        rows.append(row)
        print(
            f"{name:11} {row['dtype']:9} {version:23}"
            f" forward {forward_time * 1e3:8.1f} us, {forward_bytes / 1e6:6.1f} MB,"
            f" {100 * row['forward share of copy rate']:5.1f}% of copy |"
            f" with backward {both_time * 1e3:8.1f} us, {row['forward and backward bytes'] / 1e6:6.1f} MB,"
            f" {100 * row['forward and backward share of copy rate']:5.1f}% of copy",
            flush=True,
        )
    return rows


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write all numbers to this file, as JSON")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--complex", action="store_true", help="complex weights")
    parser.add_argument("--normalize", action="store_true", help="divide by the root mean square")
    parser.add_argument("--warps", type=int, nargs="+", choices=(1, 2, 4, 8), default=[],
        help="warps of a program of the fused kernels; several are timed in turn (default: those of the package)",
    )  # fmt: skip
    parser.add_argument("--fused", action="store_true",
        help="time the fused kernels alone, compiled: what is around them is fused as in a compiled model",
    )  # fmt: skip
    parser.add_argument("--more", action="store_true", help="also sizes of larger models")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    import triton

    # refuse what the kernels do not support, which plain PyTorch would compute instead
    os.environ["EQUITAPE_KERNELS"] = "triton"
    copy = copy_rate()
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}: copy {copy / 1e12:.2f} TB/s")
    rows = []
    for name, size in (SIZES | (MORE_SIZES if options.more else {})).items():
        parts = 2 if options.complex else 1
        dtype = getattr(torch, options.dtype)
        rows += measure(name, size, dtype, parts, options.normalize, copy, options.warps, options.fused)
    if options.output:
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "copy bytes per second": copy,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
