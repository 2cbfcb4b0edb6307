"""benchmarks/missing_runs.py names the runs that results lack, first seeds first."""

import json
import runpy
import shlex
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "missing_runs.py"
RECIPE = "{task: {name: parity}, encodings: [rope, {kind: rope, label: slow, decay: learned}, nope], seeds: [0, 1]}"


def test_missing_runs_by_seed(monkeypatch, tmp_path):
    (tmp_path / "own.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    content = runpy.run_path(str(SCRIPT))
    recipe = content["load_recipe"](tmp_path / "own.yaml")

    def run(label, seed, date, status="done", **encoding):
        return {
            "label": label,
            "seed": seed,
            "status": status,
            "encoding": {"kind": "rope", **encoding},
            "environment": date and {"date": date},
        }

    runs = [
        run("rope", 0, None),
        run("rope", 1, "2026-11-18", status="nan"),
        run("slow", 0, "2026-11-18T01", decay="learned"),
        run("slow", 1, "2026-11-16T01", decay="learned"),
    ]
    folder = tmp_path / "results" / "own"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"runs": runs}))
    content["finished"].__globals__["RESULTS"] = tmp_path / "results"
    done = content["finished"]("own", "2026-11-17")
    assert done == {("rope", 0), ("slow", 0)}
    assert list(content["missing"](recipe, done)) == [(1, "rope"), (1, "slow"), (0, "nope"), (1, "nope")]


def test_commands_of_a_shipped_recipe(monkeypatch, tmp_path, capsys):
    words = ["beyond-swaps", "--out", "runs", "--only", "fox", "--only", "path, gate", "--overrides", "train.steps=9"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    content = runpy.run_path(str(SCRIPT))
    content["main"].__globals__["RESULTS"] = tmp_path
    content["main"]()
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    chosen = [(line[line.index("--seed") + 1], line[line.index("--encoding") + 1]) for line in lines]
    assert chosen == [(seed, label) for seed in "012" for label in ("path, gate", "fox")]
    assert all(line[:4] == ["equitape", "train", "beyond-swaps", "train.steps=9"] for line in lines)
