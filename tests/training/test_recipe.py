"""Recipes: every shipped one, overrides, and everything that is refused before any work."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from small_recipe import SMALL

from cases import build
from command_line import call, invoke
from equitape.settings import Settings, list_fields
from equitape.training.checked import check_recipe, count_parameters, describe_checked, start_model
from equitape.training.recipe import (
    EvaluationSettings,
    ModelSettings,
    Recipe,
    available_recipes,
    load_recipe,
    parse_recipe,
    recipe_help,
    resolved,
    to_yaml,
)
from equitape.training.settings import Jumps, TrainSettings

SHIPPED = {
    "demo", "addition-20", "addition-40", "addition-40-paper", "state-tracking", "state-tracking-copy",
    "state-tracking-s5", "retrieval", "lm-books", "beyond-addition", "beyond-addition-20", "beyond-addition-40", "beyond-addition-growth",
    "beyond-s5", "beyond-parity", "beyond-swaps", "beyond-books", "beyond-copy", "beyond-flip-flop", "beyond-retrieval",
    "c4-155m", "ablation-updates", "ablation-equivariance", "ablation-mixer-size", "ablation-layers", "scrolls-contract-nli",
    "scrolls-gov-report", "scrolls-narrative-qa", "scrolls-qasper", "scrolls-qmsum", "scrolls-quality",
    "scrolls-summ-screen",
}  # fmt: skip


@pytest.fixture
def recipe_file(tmp_path):
    def write(**changes):
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump({**SMALL, **changes}))
        return str(path)

    return write


@pytest.fixture(scope="session")
def books(tmp_path_factory):
    """Text enough for a recipe that scores 8 x 1024 bytes."""
    folder = tmp_path_factory.mktemp("books")
    for name in ("train", "valid"):
        (folder / f"{name}.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 200)
    return folder


def scrolls_arguments(dataset, folder):
    """Data and a checkpoint, which recipes for fine-tuning leave to their users."""
    for split in ("train", "valid"):
        items = [{"id": "1", "question": "Why?", "choices": None, "answers": ["So."]}]
        row = {"task": dataset, "split": split, "doc_id": "1", "document": "A long story. " * 200, "items": items}
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    build("tape", vocab_size=258, num_hidden_layers=2).save_pretrained(folder / "start")
    checkpoint = f"encodings=[{{start: {folder / 'start'}, label: base}}]"
    return [checkpoint, "task.tokenizer=bytes", *(f"task.{name}={folder / name}.jsonl" for name in ("train", "valid"))]


def test_the_shipped_recipes_are_these():
    assert set(available_recipes()) == SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_shipped_recipe_dry_runs(name, books, tmp_path):
    recipe = load_recipe(name)
    assert recipe.description
    assert parse_recipe(resolved(recipe)) == recipe
    command = ["compare", name, "--dry-run", "--out", str(tmp_path / "out")]
    if recipe.task["name"] == "text":
        assert recipe.task["factors"] == ([1, 4, 16] if name == "demo" else [1, 2, 4, 8])
        command += [f"task.train={books / 'train.txt'}", f"task.valid={books / 'valid.txt'}"]
        command += ["task.tokenizer=bytes", f"task.cache={tmp_path}"]
    if recipe.task["name"] == "scrolls":
        command += scrolls_arguments(recipe.task["dataset"], tmp_path)
    # labels are not broken into lines
    result = call(*command, env={"COLUMNS": "120"})
    for choice in recipe.choices:
        assert choice.label in result.output
    for words in (recipe.task["name"], "parameters", "Dry run", "tokens"):
        assert words in result.output
    assert not (tmp_path / "out").exists()


BEYOND = sorted(name for name in SHIPPED if name.startswith("beyond-"))


@pytest.mark.parametrize("name", sorted(set(BEYOND) - {"beyond-books", "beyond-addition", "beyond-addition-20"}))
def test_beyond_the_paper_every_encoding_is_compared_with_jumps_where_it_reads_ids(name):
    choices = load_recipe(name).choices
    jumping = {choice.encoding["kind"] for choice in choices if choice.jumps is not None}
    assert jumping == {"rope", "fire", "tape", "tape2"}
    assert {choice.encoding["kind"] for choice in choices} == jumping | {"nope", "cope", "fox", "path"}


@pytest.mark.parametrize("name", sorted(set(BEYOND) - {"beyond-books"}))
def test_jumps_that_tape_gets_rope_gets_too(name):
    choices = load_recipe(name).choices
    kinds_of = {choice.jumps: set() for choice in choices if choice.jumps is not None}
    for choice in choices:
        kinds_of.get(choice.jumps, set()).add(choice.encoding["kind"])
    assert all({"rope", "tape2"} <= kinds for kinds in kinds_of.values())


def test_on_books_every_encoding_is_given_jumps_and_decay_and_both():
    cells = {
        (choice.encoding["kind"], with_decay(choice.encoding), choice.jumps is not None)
        for choice in load_recipe("beyond-books").choices
    }
    every = {(kind, decay, jumps) for kind in ("nope", "rope", "tape", "tape2") for decay in (0, 1) for jumps in (0, 1)}
    assert cells == every - {("nope", False, True)}


def test_queries_grow_as_the_recipe_says():
    growing = check_recipe(load_recipe("beyond-addition-growth")).configs
    assert {(config.query_growth, config.query_growth_start) for config in growing.values()} == {(0.4, 8)}
    later = check_recipe(load_recipe("beyond-addition", ["model.query_growth=0.1"]))
    assert {config.query_growth_start for config in later.configs.values()} == {later.task.trained_length}
    assert not any(config.query_growth for config in check_recipe(load_recipe("beyond-addition")).configs.values())


def with_decay(encoding):
    return encoding.get("decay", "learned" if encoding["kind"] == "tape2" else "none") != "none"


def test_the_papers_sizes():
    addition = check_recipe(load_recipe("addition-40-paper"))
    assert count_parameters(addition.configs["rope"]) == 16 * (4 * 1024**2 + 3 * 1024 * 2048 + 2 * 1024) + 31 * 1024
    c4 = load_recipe("c4-155m")
    assert (c4.train.batch_size, c4.train.steps, c4.train.learning_rate) == (512, 10_000, 1e-4)


def test_dry_run_describes_what_training_would_do(recipe_file):
    message = describe_checked(
        check_recipe(load_recipe(recipe_file(seeds=[0, 5], train={"tokens": 5000, "batch_size": 8})))
    )
    checked = check_recipe(load_recipe(recipe_file()))
    assert message["encodings"]["tape"]["seeds"] == [0, 5]
    assert message["encodings"]["tape"]["parameters"] == count_parameters(checked.configs["tape"])
    steps, tokens = (int(word.replace(",", "")) for word in message["budget"].split() if word[0].isdigit())
    assert tokens == pytest.approx(5000, abs=60)
    assert steps == pytest.approx(5000 / 8 / 5.5, rel=0.2)


def test_overrides(recipe_file):
    path = recipe_file()
    overridden = load_recipe(
        path, ["train.steps=9", "encodings=[nope, {kind: alibi, seeds: [4]}]", "train.learning_rate=1e-4", "name=mine"]
    )
    assert (overridden.train.steps, overridden.train.learning_rate, overridden.name) == (9, 1e-4, "mine")
    assert [choice.label for choice in overridden.choices] == ["nope", "alibi"]
    assert overridden.choices[1].seeds == (4,)
    assert load_recipe(path, ["evaluation.share=0.5"]).evaluation.share == 0.5
    # a budget takes the place of the recipe's
    assert load_recipe(path, ["train.minutes=2"]).train.steps is None
    with pytest.raises(ValueError, match="steps and minutes are set"):
        load_recipe(path, ["train.minutes=2", "train.steps=3"])


def test_resolved_recipe_can_be_read_back(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file(claims={"rope": {"exact_match_grid": 25}}))
    (tmp_path / "again.yaml").write_text(to_yaml(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe
    json.dumps(resolved(recipe))


def test_plans_name_every_option(recipe_file):
    """What a report shows repeats the comparison even where a later version has other defaults."""
    checked = check_recipe(
        load_recipe(recipe_file(encodings=["rope", {"kind": "tape", "label": "mine", "mixer_size": 4}]))
    )
    task = dict(checked.recipe.task)
    assert task.pop("name") == "addition"
    assert task == checked.task.options.to_dict()
    assert [choice.label for choice in checked.recipe.choices] == ["rope", "mine"]
    for choice in checked.recipe.choices:
        assert choice.encoding == checked.configs[choice.label].encoding
    assert check_recipe(parse_recipe(resolved(checked.recipe))).recipe.choices == checked.recipe.choices


WRONG = {
    "typo": ({"trian": {"steps": 3}}, [], "has no option 'trian'. Did you mean 'train'?"),
    "a seed that would play no part": ({}, ["train.seed=7"], "set seeds=[7] instead"),
    "typo inside": ({}, ["train.stps=3"], "has no option 'stps'. Did you mean 'steps'?"),
    "typo in the model": ({}, ["model.hiden_size=3"], "Did you mean 'hidden_size'?"),
    "typo in the task": ({}, ["task.trained_digit=3"], "Did you mean 'trained_digits'?"),
    "typo in an encoding": ({"encodings": [{"kind": "tape", "mixersize": 3}]}, [], "Did you mean 'mixer_size'?"),
    "unknown encoding": ({"encodings": ["rope", "tap"]}, [], "Unknown encoding 'tap'. Did you mean 'tape'?"),
    "jumps of an encoding": (
        {"encodings": [{"kind": "tape", "jumps": 0.03}]},
        [],
        "jumps of 'tape': 0.03 is not a dict",
    ),
    "large jumps": ({}, ["train.jumps={size: 1e300}"], "size"),
    "tokens of jumps": (
        {},
        ["train.jumps={after: [9999]}"],
        "name the tokens [9999], but those of task 'addition' are",
    ),
    "unknown task": ({}, ["task.name=adition"], "Unknown task 'adition'. Did you mean 'addition'?"),
    "wrong type": (
        {},
        ["train.steps=many"],
        "train.steps is 'many'; it must be a whole number from 1 to 1,000,000,000,000, or null.",
    ),
    "no task": ({"task": {}}, [], "has no task"),
    "no encodings": ({"encodings": []}, [], "has no encodings"),
    "no kind": ({"encodings": [{"label": "x"}]}, [], "is neither a kind nor a dictionary such as"),
    "no budget": ({"train": {}}, [], "train has no budget; set one of steps, tokens and minutes"),
    "labels": (
        {"encodings": ["tape", {"kind": "tape", "normalize": True}]},
        [],
        "Two encodings are called 'tape'",
    ),
    "labels alike": (
        {"encodings": [{"kind": "tape", "label": "a b"}, {"kind": "rope", "label": "a-b"}]},
        [],
        "Two encodings are called 'a-b'",
    ),
    "seeds": ({}, ["seeds=3"], "seeds is 3; it must be a list, for example [1, 2]"),
    "element of a list": ({}, ["seeds=[1, x]"], "seeds is [1, 'x']; it must be a list"),
    "averages of the wrong number": ({}, ["train.betas=[0.9]"], "train.betas is [0.9]; it must be a list of 2"),
    "average out of range": ({}, ["train.betas=0.9,1"], "train.betas is '0.9,1'; it must be a list of 2"),
    "steps beyond counting": ({}, ["train.steps=9223372036854775808"], "from 1 to 1,000,000,000,000"),
    "rate beyond float32": (
        {},
        ["train.learning_rate=1e300"],
        "learning_rate is 1e+300; it must be a number from 0 to",
    ),
    "seed beyond numpy's": ({}, ["seeds=[4294967296]"], "below 4,294,967,296"),
    "choice": ({}, ["train.schedule=cosin"], "one of 'cosine', 'linear', 'constant'. Did you mean 'cosine'?"),
    "same seed twice": ({}, ["seeds=[1, 1]"], "repeats a seed"),
    "seeds of one": ({"encodings": [{"kind": "tape", "seeds": []}]}, [], "is not a list of seeds"),
    "claims": ({"claims": {"rope": 3}}, [], "claims: 'rope' must map metrics to numbers"),
    "share": ({}, ["evaluation.share=0"], "it must be a number above 0 and at most 1"),
    "override": ({}, ["train.steps"], "Cannot parse 'train.steps'; write key=value"),
    "override into nothing": ({}, ["encodings.a=3"], "encodings is ['rope', 'tape'], not a dictionary"),
    "override that is no YAML": ({}, ["seeds=[1"], "is not valid YAML"),
    "learned table": (
        {"encodings": [{"kind": "learned", "num_positions": 8}]},
        [],
        "Encoding 'learned' does not fit task 'addition': its learned table of 8 positions is too short for 10 tokens",
    ),
    "learned table of the model": (
        {"encodings": ["learned"]},
        ["model.max_position_embeddings=9"],
        "its learned table of 9 positions",
    ),
    "range of random ids": (
        {"encodings": ["randpe"]},
        ["model.max_position_embeddings=6"],
        "Encoding 'randpe' does not fit task 'addition': it draws ids from a range of 6, too small for 7 tokens",
    ),
    "range of random ids while testing": (
        {"encodings": [{"kind": "randpe", "range": 9, "sample_in_eval": True}]},
        [],
        "draws ids from a range of 9, too small for 10 tokens",
    ),
    "heads": ({}, ["model.num_attention_heads=3"], "not a multiple of num_attention_heads 3"),
    "no width": (
        {},
        ["model.intermediate_size=0"],
        "model.intermediate_size is 0; it must be a whole number of 1 or more",
    ),
    "dropout": (
        {},
        ["model.attention_dropout=2"],
        "model.attention_dropout is 2; it must be a number from 0 to below 1",
    ),
    "spread of weights": (
        {},
        ["model.initializer_range=-1"],
        "initializer_range is -1; it must be a number of 0 or more",
    ),
    "endless rate": (
        {},
        ["train.learning_rate=.inf"],
        "learning_rate is inf; it must be a finite number from 0 to 1e+30",
    ),
    "NaN as a rate": (
        {},
        ["train.learning_rate=.nan"],
        "learning_rate is nan; it must be a finite number from 0 to 1e+30",
    ),
    "NaN as minutes": ({}, ["train.minutes=.nan"], "minutes is nan; it must be a finite number above 0"),
    "no data": ({"task": {"name": "text"}}, [], "has no text"),
    "data not there": ({"task": {"name": "text", "train": "/nowhere", "valid": "/nowhere"}}, [], "/nowhere"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused_before_any_work(case, recipe_file, tmp_path):
    changes, overrides, message = WRONG[case]
    with pytest.raises(ValueError, match=r"\w") as caught:
        check_recipe(load_recipe(recipe_file(**changes), overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    call("compare", recipe_file(**changes), *overrides, "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("bad", ["train", "valid"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("folder", None, "folder"),
        ("empty.txt", b"", "empty.txt"),
        ("bytes.txt", b"\xff\xfe\x00bad", "bytes.txt"),
        ("short.txt", b"a few words", "the longest"),
    ],
)
def test_data_that_cannot_be_used_are_refused(command, bad, name, content, message, books, recipe_file, tmp_path):
    """By one sentence, whether for training or for scoring, and nothing is written."""
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    task = {"name": "text", "length": 64, "whole_rows": True, "cache": str(tmp_path / "cache")}
    task |= {part: str(tmp_path / name if part == bad else books / f"{part}.txt") for part in ("train", "valid")}
    path = recipe_file(task=task)
    with pytest.raises(ValueError, match=message) as caught:
        check_recipe(load_recipe(path))
    assert "\n" not in str(caught.value)
    for extra in ([], ["--dry-run"]):
        result = call(command, path, "--out", tmp_path / "out", *extra, code=2)
        assert "Invalid value" in result.output
        assert not (tmp_path / "out").exists()


def test_what_happened_to_the_data_is_reported(books, recipe_file, tmp_path):
    task = {"name": "text", "length": 64, "cache": str(tmp_path)}
    task |= {part: str(books / f"{part}.txt") for part in ("train", "valid")}
    checked = check_recipe(load_recipe(recipe_file(task=task)))
    assert "1 document, 11,801 tokens in 185 rows" in checked.data
    result = call("train", recipe_file(task=task), "--dry-run")
    assert "11,801 tokens" in result.output
    assert checked.configs["tape"].trained_length == 64
    assert checked.configs["tape"].max_position_embeddings == 512


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_directory_that_cannot_be_made(command, recipe_file, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file; choose a directory" in invoke(command, recipe_file(), "--out", tmp_path / "file" / "out", code=2)


@pytest.mark.parametrize("given", ["rope", "[rope]", "rope,", "{kind: rope}"])
def test_a_single_encoding_needs_no_list(given):
    assert [choice.label for choice in load_recipe("demo", [f"encodings={given}"]).choices] == ["rope"]


def test_help_shows_lists_without_brackets():
    for command in ("train", "compare"):
        assert "encodings=rope,tape" in call(command, "--help").output


def test_files_that_are_no_recipes(tmp_path):
    with pytest.raises(ValueError, match=r"There is no recipe 'adition-20'. Did you mean 'addition-20'\?"):
        load_recipe("adition-20")
    with pytest.raises(ValueError, match=r"There is no recipe file .*; check the path, or give the name"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="is a folder; a recipe is a YAML file"):
        load_recipe(tmp_path)
    for text, message in (
        ("- a list", "must be a dictionary of settings; it is list"),
        ("a: [1", "line 1 is not valid YAML"),
        ("train: {}\ntrain: {}", "the key 'train' is given twice"),
    ):
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_recipe(tmp_path / "wrong.yaml")


def test_batches_that_processes_cannot_share_are_refused_before_any_work(recipe_file, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for override, message in (
        ("train.batch_size=4", "cannot be split over 3"),
        ("train.minutes=1", "needs a single process"),
    ):
        command = ["train", recipe_file(), "train.batch_size=6", override, "--out", str(tmp_path / "out")]
        assert message in invoke(*command, code=2)
        assert not (tmp_path / "out").exists()


def test_unknown_label_or_option_of_train(recipe_file):
    assert "Did you mean 'tape'" in invoke("train", recipe_file(), "--encoding", "tap", code=2)


def test_help_documents_every_field():
    def names(cls: type[Settings], prefix: str = ""):
        for entry in fields(cls):
            yield f"{prefix}{entry.name}"

    expected = {*names(Recipe), *names(ModelSettings, "model."), *names(TrainSettings, "train.")}
    expected |= {*names(EvaluationSettings, "evaluation."), *names(Jumps, "train.jumps.")}
    rows = list_fields(Recipe)
    assert {row.name for row in rows} == expected
    assert all(row.help.endswith(".") for row in rows)
    for command in ("train", "compare"):
        shown = " ".join(call(command, "--help").output.split())
        assert all(f" {name}" in shown for name in expected), command
    assert "train.batch_size = 64: Examples per optimizer step" in recipe_help()


def test_the_page_on_training_lists_all_fields_and_recipes():
    page = (Path(__file__).parents[2] / "docs/how-to/training.md").read_text()
    for name, default, words, _ in list_fields(Recipe):
        assert f"| `{name}` | {default} | {words} |" in page
    for name in available_recipes():
        assert f"| `{name}` | {load_recipe(name).description} |" in page


def test_a_checkpoint_is_meant_for_what_it_is_trained_on_further(books, tmp_path):
    """Begun on rows of 64 with room for 512, then on rows of 128 with room for 1024."""
    build("tape", vocab_size=258, max_position_embeddings=512, trained_length=64).save_pretrained(tmp_path / "start")
    task = {"name": "text", "length": 128, "cache": str(tmp_path)}
    task |= {part: str(books / f"{part}.txt") for part in ("train", "valid")}
    content = {
        "task": task,
        "encodings": [{"start": str(tmp_path / "start"), "label": "tape"}],
        "train": SMALL["train"],
    }
    checked = check_recipe(parse_recipe(content))
    model = start_model(str(tmp_path / "start"), checked.configs["tape"])
    assert (model.config.context, model.config.max_position_embeddings) == (128, 1024)
