"""`equitape report`: what is joined, what is kept apart, and what is refused."""

import copy
import csv
import json
import shutil
from pathlib import Path

import pytest
from made_up import make_results, make_run

from command_line import call, invoke
from equitape.report.comparison import write_report
from equitape.report.merged import merge, read_source, write_merged
from equitape.runs.results import Comparison

pytestmark = pytest.mark.usefixtures("no_drawing")

SAVED = Path(__file__).parents[1] / "fixtures/saved"


def comparison(runs, **changes):
    return Comparison.from_dict({**make_results(), "runs": runs, **changes})


def write(folder, runs, **changes):
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(comparison(runs, **changes).to_dict()))
    return folder


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_seeds_of_an_encoding_are_joined(tmp_path):
    first = write(tmp_path / "a", [make_run(label, 0, 1.2) for label in ("rope", "tape")])
    second = write(
        tmp_path / "b", [make_run(label, seed, 1.2) for label in ("tape", "fire", "rope") for seed in (1, 2)]
    )
    out = tmp_path / "out"
    assert write_merged([("a", first), ("b", second)], out) == [
        "report.html", "report.md", "report.csv", "runs.csv", "report.tex",
    ]  # fmt: skip
    text = (out / "report.md").read_text()
    assert "Merged from a, b." in text
    assert 'Compared with "rope", paired by seed' in text
    figures = {(row["label"], row["metric"]): row for row in rows(out / "report.csv")}
    tape = figures["tape", "exact_match_outside"]
    assert (tape["seeds"], tape["pairs"], tape["difference_to"], tape["headline"]) == ("3", "3", "rope", "True")
    assert figures["fire", "exact_match_outside"]["pairs"] == "2"
    expected = [
        make_run("tape", seed, 1.2)["evaluation"]["metrics"]["exact_match_outside"]
        - make_run("rope", seed, 1.2)["evaluation"]["metrics"]["exact_match_outside"]
        for seed in range(3)
    ]
    assert float(tape["difference"]) == pytest.approx(sum(expected) / 3)
    assert float(tape["difference_low"]) < float(tape["difference"]) < float(tape["difference_high"])
    assert len(rows(out / "runs.csv")) == 8 * 4
    latex = (out / "report.tex").read_text()
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 4
    assert r"exact match outside, \% $\uparrow$" in latex
    assert r"95 \%:" in latex
    assert "report.html" in {path.name for path in out.iterdir()}


def test_other_training_is_separated_and_reported():
    recipe = {**make_results()["recipe"], "train": {"steps": 100, "log_every": 5}}
    longer = {**recipe, "train": {"steps": 200, "log_every": 50}}
    merged, alike = merge(
        {
            "short": comparison([make_run("tape", 0, 1.0)], recipe=recipe),
            "long": comparison([make_run("tape", 0, 1.0)], recipe=longer),
        }
    )
    assert not alike
    assert [run.label for run in merged.runs] == ["tape (short)", "tape (long)"]
    assert merged.remarks[1] == "Caution: short and long were trained differently: train.steps 100 and 200."


def test_a_label_with_other_options_is_kept_apart():
    changed = make_run("tape", 1, 1.0)
    changed["encoding"]["normalize"] = True
    merged, alike = merge({"a": comparison([make_run("tape", 0, 1.0)]), "b": comparison([changed])})
    assert alike
    assert [(run.label, run.seed) for run in merged.runs] == [("tape", 0), ("tape (b)", 1)]


def test_a_label_with_other_jumps_is_kept_apart():
    recipe = make_results()["recipe"]
    jumping = {**recipe, "encodings": [{"kind": "tape", "jumps": {"rate": 0.1}}]}
    sources = {
        "plain": comparison([make_run("tape", 0, 1.0)], recipe={**recipe, "encodings": ["tape"]}),
        "jumping": comparison([make_run("tape", 1, 1.0)], recipe=jumping),
        "again": comparison([make_run("tape", 2, 1.0)], recipe=jumping),
    }
    merged, _ = merge(sources)
    labels = [(run.label, run.seed) for run in merged.runs]
    assert labels == [("tape", 0), ("tape (jumping)", 1), ("tape (again)", 2)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"start": "x/tape"}, {"start": "y/tape"}),
        ({"start": "x/tape", "jumps": {"rate": 0.1}}, {"start": "x/tape", "jumps": {"rate": 0.5}}),
    ],
)
def test_runs_that_started_or_jumped_otherwise_are_kept_apart(one, other):
    recipe = {**make_results()["recipe"], "model": {}}
    sources = {
        name: comparison([make_run("tape", seed, 1.0)], recipe={**recipe, "encodings": [given]})
        for seed, (name, given) in enumerate({"a": one, "b": other, "c": one}.items())
    }
    merged, _ = merge(sources)
    assert [(run.label, run.seed) for run in merged.runs] == [("tape", 0), ("tape", 2), ("tape (b)", 1)]


def test_runs_on_other_data_are_refused(tmp_path):
    folders = [(name, write(tmp_path / name, [make_run("tape", 0, 1.0)])) for name in ("a", "b")]
    for (_, folder), digest in zip(folders, ("one", "two"), strict=True):
        (folder / "data-digest.txt").write_text(digest)
    with pytest.raises(ValueError, match="different data"):
        write_merged(folders, tmp_path / "out")


def test_a_seed_in_two_folders_is_taken_once():
    failed, done = make_run("tape", 0, 1.0, "failed", "no"), make_run("tape", 0, 1.4)
    merged, _ = merge({"a": comparison([failed]), "b": comparison([done]), "c": comparison([done])})
    assert [run.status for run in merged.runs] == ["done"]
    assert merged.remarks[1:] == ["tape, seed 0 is in several folders; showing the first."]


def test_remarks_about_runs_are_kept_and_shown(tmp_path):
    remarks = ["Runs of Monday shared the GPU.", "Runs of Tuesday had it alone."]
    # the last has the remark of the first
    merged, _ = merge(
        {
            name: comparison([make_run("tape", number, 1.0)], remarks=[remarks[number % 2]])
            for number, name in enumerate("abc")
        }
    )
    assert merged.remarks == [*remarks, "Merged from a, b, c."]
    write_report(Comparison.from_dict(merged.to_dict()), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert all(f"- {remark}\n" in text for remark in merged.remarks)


def test_single_runs_and_old_files(tmp_path):
    """What version 0.1 wrote: two folders of runs make the comparison they are from."""
    runs = SAVED / "comparison/runs"
    folders = [(path.name, path) for path in sorted(runs.iterdir())]
    write_merged(folders, tmp_path / "out")
    found = rows(tmp_path / "out/report.csv")
    assert {(row["label"], row["seeds"]) for row in found} == {("rope", "2"), ("tape, two orders", "2")}
    whole = read_source(SAVED / "comparison")
    assert {run.label for run in whole.runs} == {"rope", "tape, two orders"}


def test_evaluations_stand_side_by_side(tmp_path):
    shutil.copytree(SAVED / "evaluation", tmp_path / "other")
    arguments = [f"mine={SAVED / 'evaluation'}", str(tmp_path / "other"), "--out", str(tmp_path / "out")]
    result = call("report", *arguments)
    assert "report.html, report.md, report.csv, report.tex" in result.output
    assert "| metric | mine | other |" in (tmp_path / "out/report.md").read_text()
    assert {row["model"] for row in rows(tmp_path / "out/report.csv")} == {"mine", "other"}


def test_refusals(tmp_path):
    a = write(tmp_path / "a", [make_run("tape", 0, 1.0)])
    recipe = copy.deepcopy(make_results()["recipe"])
    recipe["task"]["trained_digits"] = 10
    b = write(tmp_path / "b", [make_run("tape", 0, 1.0)], recipe=recipe)
    (tmp_path / "empty").mkdir()

    def refused(*folders):
        result = invoke("report", *folders, "--out", tmp_path / "out", code=2)
        assert not (tmp_path / "out").exists()
        return result

    assert "'a' and 'b' are of different tasks (task.trained_digits 20 and 10)" in refused(a, b)
    assert "has no results.json of equitape compare" in refused(tmp_path / "empty")
    assert "Two folders are called 'a'; rename one with NAME=FOLDER." in refused(a, a)
    assert "make one report per kind" in refused(a, SAVED / "evaluation")


@pytest.mark.parametrize("kind", ["comparison", "evaluation", "run"])
def test_a_report_never_replaces_that_of_its_sources(kind, tmp_path):
    source = SAVED / "comparison/runs" if kind == "run" else SAVED / kind
    own = tmp_path / "own"
    shutil.copytree(next(iter(sorted(source.iterdir()))) if kind == "run" else source, own)
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    result = invoke("report", own, "--out", own, code=2)
    assert "so it holds a run, a comparison or an evaluation with its own report; choose another folder" in result
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before
