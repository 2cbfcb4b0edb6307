"""Score trained runs again with queries that grow with the tokens read.

    python benchmarks/rescore.py runs/beyond/* --growth 0 0.05 0.1 0.15 --start 40 --out scores.json
    python benchmarks/rescore.py runs/beyond/* --growth 0 0.1 --start 40 --seed 1000 --task stride=5 \\
        --task tested_digits=30

The runs are folders of `equitape train`; their weights stay as they are. Choose a growth on lengths that no result is
reported on (--task changes options of the task) and with another --seed than that of the run, which is the default.
"""

import argparse
import json
from pathlib import Path

import yaml

from equitape import EquitapeForCausalLM
from equitape.pretrained.loading import choose_device
from equitape.runs.files import read_json, write_json
from equitape.tasks import build_task
from equitape.training.run import MODEL, RECIPE, RUN, score
from equitape.training.settings import TrainSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--growth", type=float, nargs="+", required=True)
    parser.add_argument("--start", type=int, required=True, help="tokens from which queries grow")
    parser.add_argument("--seed", type=int, help="of the evaluation; default: that of the run")
    parser.add_argument("--task", action="append", default=[], help="NAME=VALUE, an option of the task; repeatable")
    parser.add_argument("--out", type=Path, help="write all scores here, as JSON")
    given = parser.parse_args()
    changes = {name: yaml.safe_load(value) for name, value in (each.split("=", 1) for each in given.task)}
    scores = []
    for folder in given.runs:
        run, recipe = read_json(folder / RUN), yaml.safe_load((folder / RECIPE).read_text())
        options = {**recipe["task"], **changes}
        task = build_task(options.pop("name"), options)
        settings = TrainSettings.parse(recipe["train"], "train")
        model = EquitapeForCausalLM.from_pretrained(folder / MODEL).to(choose_device()).eval()
        for growth in given.growth:
            model.config.query_growth, model.config.query_growth_start = growth, given.start
            found = score(model, task, run["seed"] if given.seed is None else given.seed, 1.0, settings)
            about = {"label": run["label"], "seed": run["seed"], "growth": growth, "start": given.start}
            scores.append({**about, "metrics": found.metrics})
            print(json.dumps(scores[-1]), flush=True)
            if given.out:
                write_json(given.out, scores)


if __name__ == "__main__":
    main()
