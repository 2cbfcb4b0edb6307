"""Reduced recipes: every shipped recipe builds and runs offline on the built-in text."""

import pytest

from command_line import call
from equitape.tasks import available_tasks
from equitape.training import small
from equitape.training.checked import check_recipe
from equitape.training.recipe import available_recipes, load_recipe

pytestmark = pytest.mark.usefixtures("no_drawing")


@pytest.fixture(autouse=True)
def no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EQUITAPE_DATA", raising=False)
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", available_recipes())
def test_every_recipe_has_a_reduced_form_that_needs_no_data(name):
    full = load_recipe(name)
    checked = check_recipe(load_recipe(name, small=True))
    assert checked.recipe.name == f"{name}-small"
    assert checked.recipe.task["name"] == full.task["name"]
    assert checked.recipe.train.steps == small.TRAIN["steps"]
    assert checked.recipe.train.compile is False
    assert not checked.recipe.claims
    assert checked.recipe.description.startswith(small.NOTE)
    if all(choice.start is None for choice in full.choices):
        assert [choice.label for choice in checked.recipe.choices] == [choice.label for choice in full.choices]
    assert all(choice.seeds == (0,) and choice.start is None for choice in checked.recipe.choices)


def test_every_task_has_reduced_options():
    assert set(small.TASKS) == set(available_tasks())


def test_overrides_change_the_reduced_recipe():
    recipe = load_recipe("lm-books", ["train.steps=3", "encodings=[rope]", "task.length=64"], small=True)
    assert recipe.train.steps == 3
    assert recipe.task["length"] == 64
    assert recipe.task["train"] == "shipped:train"
    assert [choice.label for choice in recipe.choices] == ["rope"]


@pytest.mark.parametrize("name", ["lm-books", "scrolls-contract-nli"])
def test_a_reduced_comparison_runs_to_its_report(name, tmp_path):
    arguments = ["compare", name, "--small", "encodings=[rope]", "train.steps=2", "train.batch_size=2"]
    call(*arguments)
    assert (tmp_path / f"runs/{name}-small/report.html").exists()


def test_a_recipe_with_one_encoding_can_be_reduced():
    for one in ("tape", "{kind: tape}"):
        recipe = load_recipe("lm-books", [f"encodings={one}"], small=True)
        assert [choice.label for choice in recipe.choices] == ["tape"]


def test_a_single_run_can_be_reduced(tmp_path):
    done = call("train", "addition-20", "--small", "--encoding", "tape", "--dry-run")
    assert "10 steps" in " ".join(done.output.split())
