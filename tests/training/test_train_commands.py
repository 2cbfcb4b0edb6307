"""`train` and `compare` at the command line: names of folders, interruptions, old names of settings, notes of a resume."""

import json
import shutil
import sys

import pytest
from small_recipe import SMALL

from command_line import invoke
from equitape.training import run as single
from equitape.training.checked import check_recipe
from equitape.training.checkpoints import CHECKPOINTS
from equitape.training.recipe import load_recipe, parse_recipe, to_yaml
from equitape.training.run import differences, execute
from equitape.training.settings import TrainSettings

pytestmark = pytest.mark.usefixtures("no_drawing")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with the recipe small.yaml."""
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    (folder / "small.yaml").write_text(to_yaml(parse_recipe({**SMALL, "name": "small", "encodings": ["rope"]})))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("name", ["../../x", "..", ".", "/tmp/x", "日本", "x" * 300])
def test_a_name_stays_inside_runs(command, name, here):
    invoke(command, "small.yaml", f"name={name}", "train.steps=1")
    assert {path.name for path in here.iterdir()} == {"small.yaml", "runs"}
    assert len(list((here / "runs").iterdir())) == 1
    assert {path.name for path in here.parent.iterdir()} == {"c"}


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_damaged_result_does_not_train_again(command, here):
    path = here / "out" / ("run.json" if command == "train" else "runs/rope-seed0/run.json")
    words = [command, "small.yaml", "train.steps=1", "--out", "out"]
    invoke(*words)
    without_scores = json.dumps(json.loads(path.read_text()) | {"evaluation": None})
    for text in ("null", "{}", "{", '{"status": "done"}', "[" * 200_000, without_scores):
        path.write_text(text)
        said = invoke(*words, *["--resume"] * (command == "train"), code=2)
        assert "run.json is damaged; delete it to repeat the run" in said
        assert path.read_text() == text


def test_the_result_of_another_run_is_refused(here):
    words = ["compare", "small.yaml", "train.steps=1", "seeds=[0,1]", "--out", "out"]
    invoke(*words)
    shutil.copy("out/runs/rope-seed1/run.json", "out/runs/rope-seed0/run.json")
    assert "rope-seed0/run.json is of rope, seed 1; delete it to repeat the run" in invoke(*words, code=2)


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml"])
def test_a_report_of_damaged_files_is_refused(name, here):
    (here / "run").mkdir()
    for file in ("run.json", "recipe.yaml"):
        (here / "run" / file).write_text("[" * 200_000 if file == name else "{}")
    invoke("report", "run", "--out", "report", code=2)
    assert not (here / "report").exists()


def test_labels_in_other_scripts_and_long_ones(here):
    labels = ["тейп", "роуп", "x" * 300, "x" * 301]
    listed = ", ".join(f"{{kind: rope, label: {label}}}" for label in labels)
    invoke("compare", "small.yaml", f"encodings=[{listed}]", "train.steps=1", "--out", "out")
    assert len(list((here / "out" / "runs").glob("*/run.json"))) == 4


@pytest.mark.parametrize(
    "override", [f"seeds=[{2**32}]", f"train.steps={2**63}", f"encodings=[{{kind: rope, seeds: [{2**40}]}}]"]
)
def test_numbers_that_are_too_large_are_refused_before_any_work(override, here):
    invoke("compare", "small.yaml", override, "--dry-run", code=2)
    invoke("train", "small.yaml", "--seed", 2**32, code=2)
    assert not (here / "runs").exists()


@pytest.mark.parametrize(("command", "more"), [("train", " --resume"), ("compare", "")])
def test_an_interrupt_ends_with_the_command_that_continues(command, more, here, monkeypatch):
    words = [command, "small.yaml", "train.save_steps=1", "encodings=[rope, nope]", "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["equitape", *words])

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(single, "score", interrupt)
    printed = invoke(*words, code=130)
    kept = (
        "Kept the checkpoint of step 4 in out."
        if command == "train"
        else "Kept 0 of 2 runs, and checkpoints of 1 more in"
    )
    assert f"Interrupted. {kept}" in printed
    assert (
        f"Continue with: equitape {command} small.yaml train.save_steps=1 'encodings=[rope, nope]' --out out{more}"
        in printed
    )
    assert "Traceback" not in printed
    monkeypatch.undo()
    monkeypatch.chdir(here)
    printed = invoke(*words, *more.split())
    assert "Continuing from step 4." in printed


def test_damage_is_reported(here):
    checked = check_recipe(load_recipe("small.yaml", ["train.save_steps=1", "train.save_total_limit=3"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "score", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            execute(checked, "rope", 0, here / "out")
    (here / "out" / CHECKPOINTS / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    lines = (here / "out" / "log.jsonl").read_text().splitlines()
    (here / "out" / "log.jsonl").write_text("\n".join([lines[0], lines[1][:9], *lines[2:]]) + "\n")
    printed = invoke("train", "small.yaml", "train.save_steps=1", "--out", "out", "--resume")
    assert "Skipped damaged checkpoints in out: checkpoint-4." in printed
    assert "Continuing from step 3." in printed
    assert "log.jsonl is damaged: 1 of the first 3 steps are missing, from step 2 on." in printed
    printed = invoke("train", "small.yaml", "train.save_steps=1", "--out", "out", "--resume")
    assert "The run in out is already finished." in printed
    assert "Wrote weights" not in printed


def test_old_names_of_settings_are_read_with_a_note(here, caplog):
    (here / "old.yaml").write_text((here / "small.yaml").read_text().replace("max_grad_norm: 1.0", "clip: 0.5"))
    assert load_recipe("old.yaml").train.max_grad_norm == 0.5
    assert "train.clip is now called train.max_grad_norm" in caplog.text
    assert load_recipe("old.yaml", ["train.max_grad_norm=2"]).train.max_grad_norm == 2
    assert (
        load_recipe("small.yaml", ["train.clip=3", "train.keep=7"]).train
        == load_recipe("small.yaml", ["train.max_grad_norm=3", "train.save_total_limit=7"]).train
    )
    # the recipe of an old run folder is the same recipe
    assert differences(here / "old.yaml", load_recipe("small.yaml", ["train.max_grad_norm=0.5"]), ("name",)) == []
    for old, new in TrainSettings.aliases.items():
        assert old not in to_yaml(load_recipe("small.yaml")).split("train:")[1].replace(new, "")
