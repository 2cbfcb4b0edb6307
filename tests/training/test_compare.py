"""Comparisons: resumed as a whole, one failure costs one run, and the schema of results.json."""

import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich import progress as bars
from rich.console import Console
from small_recipe import SMALL

from cases import randomise
from command_line import call, invoke
from equitape import EquitapeForCausalLM
from equitape.report import write_report
from equitape.runs.environment import join_environments
from equitape.runs.progress import Progress
from equitape.runs.results import Comparison
from equitape.training import checkpoints, parallel
from equitape.training import compare as comparison
from equitape.training import run as single
from equitape.training.checked import check_recipe
from equitape.training.compare import compare
from equitape.training.log import StepLog
from equitape.training.recipe import parse_recipe, to_yaml
from equitape.training.run import PadTo, execute, explain
from equitape.training.show import show_results

pytestmark = pytest.mark.usefixtures("no_drawing")

KEYS = {
    "label", "encoding", "seed", "status", "note", "parameters", "steps", "trained_tokens", "seconds",
    "tokens_per_second", "peak_mib", "evaluate_seconds", "log", "evaluation", "environment",
}  # fmt: skip


def checked(**changes):
    return check_recipe(parse_recipe({**SMALL, "name": "small", **changes}))


def curves(results: Comparison) -> dict:
    return {(run.label, run.seed): run.log for run in results.runs}


def statuses(results: Comparison) -> list[str]:
    return [run.status for run in results.runs]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "out"
    compare(checked(seeds=[0, 1], train={"steps": 6, "batch_size": 4, "save_steps": 2}), out)
    return out


def test_results_have_the_documented_schema(finished):
    results = json.loads((finished / "results.json").read_text())
    assert results.keys() == {"name", "recipe", "task", "claims", "claims_source", "environment", "remarks", "runs"}
    assert results["task"].keys() == {
        "name", "idea", "headline", "higher_is_better", "trained_length", "tested_length", "metrics", "warning",
    }  # fmt: skip
    assert results["environment"].keys() == {
        "equitape", "torch", "transformers", "accelerate", "python", "device", "processor", "commit", "date",
        "side_by_side",
    }  # fmt: skip
    assert all(isinstance(value, str) for value in results["environment"].values())
    assert [(run["label"], run["seed"]) for run in results["runs"]] == [
        ("rope", 0),
        ("rope", 1),
        ("tape", 0),
        ("tape", 1),
    ]
    for run in results["runs"]:
        assert run.keys() == KEYS
        assert (run["status"], run["note"], run["steps"]) == ("done", "", 6)
        assert [step for step, _ in run["log"]] == [1, 2, 3, 4, 5, 6]
        assert results["task"]["headline"] in run["evaluation"]["metrics"]
        assert run["encoding"]["kind"] == run["label"]
        assert run["encoding"].get("theta") == 10000.0
        assert min(run["parameters"], run["trained_tokens"], run["seconds"], run["tokens_per_second"]) > 0
    assert (finished / "recipe.yaml").exists()


def test_same_seed_same_data_other_seed_other_data(finished):
    results = Comparison.read(finished / "results.json")
    losses, sizes = curves(results), {run.label: run.parameters for run in results.runs}
    # at its start TAPE is RoPE, so the first loss is the same if data and weights are
    assert losses["rope", 0][0] == pytest.approx(losses["tape", 0][0], rel=1e-6)
    assert sizes["rope"] < sizes["tape"]
    assert losses["rope", 0][0] != losses["rope", 1][0]


def test_finished_runs_are_kept_and_others_added(finished, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        comparison,
        "execute",
        lambda checked, label, seed, *a, **k: made.append((label, seed)) or execute(checked, label, seed, *a, **k),
    )
    finished = Path(shutil.copytree(finished, tmp_path / "out"))
    before = curves(Comparison.read(finished / "results.json"))
    changes = {"train": {"steps": 6, "batch_size": 4, "save_steps": 2}}
    compare(checked(seeds=[0, 1], **changes), finished)
    assert made == []
    printed = io.StringIO()
    console = Console(file=printed, width=500)
    results = compare(checked(seeds=[1, 2], encodings=["rope", "nope"], **changes), finished, console=console)
    assert "are not in the report: rope-seed0, tape-seed0, tape-seed1." in printed.getvalue()
    assert made == [("nope", 1), ("rope", 2), ("nope", 2)]
    assert curves(results)["rope", 1] == before["rope", 1]
    assert curves(compare(checked(seeds=[0, 1], **changes), finished)) == before


def interrupted(out: Path, steps: int) -> None:
    """A comparison that is killed at a step, counted over all runs."""
    left, end_step = [steps], StepLog.end_step

    def counted(self, *args):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        end_step(self, *args)

    StepLog.end_step = counted
    compare(checked(seeds=[0, 1], train={"steps": 6, "batch_size": 4, "save_steps": 2}), out)


@pytest.mark.parametrize("steps", [2, 11])
def test_killed_comparison_goes_on(steps, finished, tmp_path):
    process = multiprocessing.get_context("fork").Process(target=interrupted, args=(tmp_path / "out", steps))
    process.start()
    process.join()
    assert process.exitcode == -9
    results = compare(checked(seeds=[0, 1], train={"steps": 6, "batch_size": 4, "save_steps": 2}), tmp_path / "out")
    assert curves(results) == curves(Comparison.read(finished / "results.json"))
    assert statuses(results) == ["done"] * 4


def test_killed_while_scoring_trains_no_more(tmp_path, monkeypatch):
    small = checked()

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(single, "score", die)
    with pytest.raises(KeyboardInterrupt):
        execute(small, "tape", 0, tmp_path)
    log = (tmp_path / "log.jsonl").read_bytes()
    monkeypatch.undo()
    entry = execute(small, "tape", 0, tmp_path, resume=True)
    assert entry.done
    assert len(entry.log) == 4
    assert (tmp_path / "log.jsonl").read_bytes() == log
    assert not (tmp_path / "checkpoints").exists()


def test_one_seed_of_everything_comes_first(tmp_path, monkeypatch):
    made = []

    def note(checked, label, seed, *_):
        made.append((label, seed))
        return comparison.describe_failure(checked, label, seed, "not tried")

    monkeypatch.setattr(comparison, "attempt", note)
    results = compare(checked(encodings=["rope", {"kind": "tape", "seeds": [4]}, "alibi"], seeds=[3, 1]), tmp_path)
    assert made == [("rope", 3), ("tape", 4), ("alibi", 3), ("rope", 1), ("alibi", 1)]
    order = [(run.label, run.seed) for run in results.runs]
    assert order == [("rope", 3), ("rope", 1), ("tape", 4), ("alibi", 3), ("alibi", 1)]


def test_a_failing_encoding_costs_only_itself(tmp_path, monkeypatch):
    forward = EquitapeForCausalLM.forward

    def fail(self, *args, **kwargs):
        if self.config.encoding["kind"] == "alibi":
            raise RuntimeError("out of luck\nand more")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(EquitapeForCausalLM, "forward", fail)
    small = checked(encodings=["rope", "alibi", "tape"])
    results = compare(small, tmp_path)
    assert statuses(results) == ["done", "failed", "done"]
    assert results.runs[1].note == "RuntimeError: out of luck"
    write_report(results, tmp_path)
    assert "out of luck" in (tmp_path / "report.md").read_text()
    # tried again when it may work
    monkeypatch.undo()
    assert statuses(compare(small, tmp_path)) == ["done"] * 3


def test_a_nan_loss_is_reported_and_kept(tmp_path):
    # a learning rate that no model survives
    results = compare(checked(encodings=["rope"], train={"steps": 30, "batch_size": 4, "learning_rate": 1e30, "warmup_ratio": 0.0, "max_grad_norm": 0.0, "save_steps": 1}), tmp_path)  # fmt: skip
    run = results.runs[0]
    assert (run.status, run.evaluation) == ("nan", None)
    assert "was NaN or infinite at step" in run.note
    assert checkpoints.newest(tmp_path / "runs" / "rope-seed0") is not None
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)


def test_runs_side_by_side_are_the_same(finished, tmp_path, monkeypatch):
    # processes that start as copies of this one start at once
    monkeypatch.setattr(parallel, "get_context", lambda _: multiprocessing.get_context("fork"))
    results = compare(checked(seeds=[0, 1], encodings=["tape"], train={"steps": 6, "batch_size": 4, "save_steps": 2}), tmp_path, jobs=2)  # fmt: skip
    expected = curves(Comparison.read(finished / "results.json"))
    assert curves(results) == {key: value for key, value in expected.items() if key[0] == "tape"}


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "get_context", lambda _: multiprocessing.get_context("fork"))
    monkeypatch.setattr(comparison, "attempt_anew", die)
    results = compare(checked(), tmp_path, jobs=2)
    assert statuses(results) == ["missing", "missing"]
    monkeypatch.undo()
    assert statuses(compare(checked(), tmp_path)) == ["done", "done"]


WAITING = """
import os, pathlib, sys, time
from equitape.runs.progress import Progress
from equitape.training.parallel import side_by_side

def work(name):
    path = pathlib.Path(sys.argv[1]) / name
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(120)

if __name__ == "__main__":
    names = {("a", 0): ("a",), ("b", 0): ("b",)}
    list(side_by_side(work, names, 2, {key: pathlib.Path("nothing") for key in names}, None, Progress()))
"""


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    pytest.fail(f"Not so after {seconds} s.")


def is_alive(process):
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_runs_side_by_side_end_with_the_comparison(tmp_path):
    """A run left over from a comparison that was killed would write where the next one continues it."""
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "runs").mkdir()
    command = [sys.executable, tmp_path / "waiting.py", tmp_path / "runs"]
    comparison = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    files = [tmp_path / "runs" / name for name in "ab"]
    try:
        wait_until(lambda: all(file.exists() for file in files))
        workers = [file.read_text() for file in files]
        assert all(map(is_alive, workers))
    finally:
        comparison.kill()
        comparison.wait()
    wait_until(lambda: not any(map(is_alive, workers)))


def test_last_step_of_a_log(tmp_path):
    log = tmp_path / "log.jsonl"
    assert parallel.last_step(log) == 0
    log.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 1000)) + '{"step": 10')
    assert parallel.last_step(log) == 999


def test_directories_that_are_refused(finished, tmp_path):
    for changes, message in (
        ({"seeds": [0]}, r"already holds a different run \(train.steps was 6, now 4\)"),
        (
            {"seeds": [0], "model": {**SMALL["model"], "hidden_size": 32}},
            r"model.hidden_size was 16, now 32; train.steps was",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            compare(checked(**changes), finished)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="is not empty and has no run to continue"):
        compare(checked(), tmp_path)
    with pytest.raises(ValueError, match="is a file; choose a directory"):
        compare(checked(), tmp_path / "letter.txt")


def test_options_at_their_defaults_are_no_difference(finished, tmp_path):
    """Neither named nor left out, as in directories of before plans named them."""
    finished = Path(shutil.copytree(finished, tmp_path / "out"))
    given = {**SMALL, "name": "small", "seeds": [0, 1], "train": {"steps": 6, "batch_size": 4, "save_steps": 2}}
    options = checked().task.options.to_dict()
    for task in (SMALL["task"], {**options, "name": "addition"}):
        recipe = parse_recipe({**given, "task": task})
        comparison.check_directory(finished, recipe)
        (finished / "recipe.yaml").write_text(to_yaml(recipe))
        comparison.check_directory(finished, checked(**{key: given[key] for key in ("seeds", "train")}).recipe)


def test_data_that_changed_are_refused(tmp_path):
    """Encodings trained on different texts must not stand side by side."""
    text = tmp_path / "text.txt"
    options = {"length": 32, "factors": [1], "eval_tokens": 32, "cache": str(tmp_path / "cache")}
    task = {"name": "text", "train": str(text), "valid": str(text), **options}

    def of(*encodings):
        return checked(task=task, encodings=list(encodings))

    text.write_text("one and two are three " * 40)
    results = compare(of("rope"), tmp_path / "out")
    assert results.task.warning.startswith("100.0% of the held-out text also occurs in the training data")
    compare(of("rope", "nope"), tmp_path / "out")
    text.write_text("two and two are four " * 40)
    with pytest.raises(ValueError, match=r"holds runs on other data: the files of task.train or task.valid changed"):
        compare(of("rope", "alibi"), tmp_path / "out")
    with pytest.raises(ValueError, match="holds runs on other data"):
        execute(of("rope"), "rope", 0, tmp_path / "out" / "runs" / "rope-seed0", resume=True)
    # made before digests were kept
    (tmp_path / "out" / "data-digest.txt").unlink()
    compare(of("rope"), tmp_path / "out")


def test_a_single_run_is_no_comparison(tmp_path):
    given = checked(encodings=["rope"], seeds=[0])
    execute(given, "rope", 0, tmp_path)
    with pytest.raises(ValueError, match="holds a single run of equitape train; choose another directory"):
        comparison.check_directory(tmp_path, given.recipe)


def test_a_comparison_is_no_single_run(tmp_path):
    compare(checked(encodings=["rope"], seeds=[0]), tmp_path)
    with pytest.raises(ValueError, match="holds a comparison of equitape compare; choose another directory"):
        single.check_directory(tmp_path, checked(encodings=["rope"], seeds=[0]).recipe, resume=False)


def test_same_label_for_another_encoding_is_refused(tmp_path):
    compare(checked(encodings=["tape"]), tmp_path)
    with pytest.raises(
        ValueError, match=r"tape-seed0 already holds a different run \(encodings.0.normalize was False, now True\)"
    ):
        compare(checked(encodings=[{"kind": "tape", "normalize": True}]), tmp_path)
    # how often something is written down changes no run
    train = {**SMALL["train"], "logging_steps": 1, "save_steps": 1, "save_total_limit": 5, "dataloader_num_workers": 1}
    assert compare(checked(encodings=["tape"], train=train), tmp_path).runs[0].done


def test_several_processes_are_for_train(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="use launchers with equitape train only"):
        compare(checked(), tmp_path / "out")


def test_train_command(tmp_path):
    (tmp_path / "small.yaml").write_text(to_yaml(checked().recipe))
    out = tmp_path / "run"
    command = [
        "train",
        str(tmp_path / "small.yaml"),
        "train.steps=3",
        "--encoding",
        "tape",
        "--seed",
        "7",
        "--out",
        str(out),
    ]
    result = call(*command)
    assert "exact match grid" in result.output
    entry = json.loads((out / "run.json").read_text())
    assert (entry["label"], entry["seed"], entry["steps"]) == ("tape", 7, 3)
    assert EquitapeForCausalLM.from_pretrained(out / "model").config.encoding["kind"] == "tape"
    assert "already holds this run; continue it with --resume" in invoke(*command, code=2)
    resumed = call(*command, "--resume")
    assert "no run" not in resumed.output
    other = invoke(*command, "--resume", "train.learning_rate=0.5", code=2)
    assert "already holds a different run (train.learning_rate was 0.001, now 0.5)" in other


def test_compare_command_reports_failures(tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text(to_yaml(checked(encodings=["rope"]).recipe))
    command = ["compare", str(tmp_path / "small.yaml"), "train.steps=2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(comparison, "execute", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no")))
    call(*command, code=1)
    monkeypatch.undo()
    result = call(*command)
    assert "report.html" in result.output


def test_evaluation_while_training_is_logged(tmp_path):
    small = checked(train={"steps": 4, "batch_size": 4, "eval_steps": 2})
    execute(small, "tape", 0, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "evaluation" in line] == [2, 4]
    assert small.task.headline in lines[-1]["evaluation"]


def test_the_bar_moves_with_every_step(tmp_path, monkeypatch):
    moved, update = [], bars.Progress.update

    def watched(self, task, **fields):
        moved.append(fields.get("count", ""))
        update(self, task, **fields)

    monkeypatch.setattr(bars.Progress, "update", watched)
    small = checked(encodings=["nope"], train={"steps": 3, "batch_size": 4, "logging_steps": 100})
    execute(small, "nope", 0, tmp_path, progress=Progress(Console(file=io.StringIO(), force_terminal=True)))
    assert list(dict.fromkeys(count for count in moved if "step" in count)) == [
        f"step {step} of 3" for step in (1, 2, 3)
    ]


def test_padding_to_one_length_changes_no_loss():
    task = checked().task
    examples = [task.training_set(0)[index] for index in range(5)]
    model = EquitapeForCausalLM(checked().configs["tape"])
    randomise(model)
    short, padded = task.collate(examples), PadTo(task.collate, 20, task.pad_token_id)(examples)
    assert padded["input_ids"].shape == padded["attention_mask"].shape == (5, 20)
    torch.testing.assert_close(model(**short).loss, model(**padded).loss)


def test_environments_of_several_runs_are_joined():
    early = {"torch": "2.11", "commit": "a", "date": "2026-01-02", "side_by_side": 2}
    late = {"torch": "2.11", "commit": None, "date": "2026-01-09", "side_by_side": 1}
    middle = {**early, "date": "2026-01-05"}
    joined = join_environments([late, middle, early])
    assert joined == {
        "torch": "2.11",
        "commit": "unknown, a",
        "date": "2026-01-02, 2026-01-09",
        "side_by_side": "1, 2",
    }


def test_resuming_an_empty_folder_is_reported(tmp_path):
    (tmp_path / "small.yaml").write_text(to_yaml(checked().recipe))
    command = ["train", str(tmp_path / "small.yaml"), "train.steps=1", "--out", str(tmp_path / "new"), "--resume"]
    result = call(*command)
    assert f"No run to resume in {tmp_path / 'new'}; starting from step 0." in result.output


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: out of memory")]
)
def test_train_reports_out_of_memory_in_one_line(tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(single, "fit", fail)
    (tmp_path / "small.yaml").write_text(to_yaml(checked().recipe))
    result = call("train", tmp_path / "small.yaml", "--out", tmp_path / "out", code=1)
    assert "Out of memory. Try a larger train.gradient_accumulation_steps" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("jobs", "advice"), [(1, "Try a larger train.gradient_accumulation_steps"), (5, "fewer runs than 5 at a time")]
)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. " + "Process 449 has " * 30),
        # what a process hears that finds no room at all
        torch.AcceleratorError("CUDA error: out of memory\nProcess 449 has"),
    ],
)
def test_running_out_of_memory_is_one_line_with_advice(error, jobs, advice):
    message = explain(error, jobs)
    assert advice in message
    assert "train.gradient_checkpointing=true" in message
    assert "a smaller task.batch_tokens" in message
    assert "Process 449" not in message


@pytest.mark.parametrize("width", [80, 60, 200])
def test_a_table_of_results_cuts_no_word_and_counts_what_it_leaves_out(width):
    names = [f"{kind}_{times}x" for times in (1, 2) for kind in ("bits_per_byte", "perplexity", "improvement")]
    evaluation = {"metrics": dict.fromkeys(names, 3.14159)}
    one = {"status": "done", "parameters": 155123456, "seconds": 1234.0, "evaluation": evaluation}
    runs = [{"label": label, "encoding": {}, "seed": 0} for label in ("rope", "tape")]
    shown = io.StringIO()
    task = {"name": "text", "headline": names[0]}
    results = Comparison.from_dict(
        {"name": "books", "recipe": {}, "task": task, "runs": [runs[0] | one, runs[1] | {"status": "failed"}]}
    )
    show_results(results, Console(file=shown, width=width))
    text = shown.getvalue()
    assert "…" not in text
    assert all(word in text for word in ("encoding", "parameters", "training", "155,123,456", "1234 s", "byte"))
    columns = next(line for line in text.splitlines() if "155,123,456" in line).count("3.142")
    assert columns == {80: 3, 60: 1, 200: 4}[width]
    assert f"The report has {len(names) - columns} more metrics per run." in " ".join(text.split())
    # lower is better, as the task declares it
    assert text.count("1x ↓") + text.count("2x ↓") == {80: 2, 60: 1, 200: 3}[width]
