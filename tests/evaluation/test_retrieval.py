"""Passkey and needles with readers that find what is hidden, as far as they see."""

import json
import re

import pytest
from small import Reader, evaluated

from equitape.data.text import Document
from equitape.data.tokenizers import train_bpe
from equitape.evaluation import build_evaluation, evaluate, rescore
from equitape.report.evaluation import report_folder
from equitape.tasks.needle_kinds import PASSKEY, PASSKEY_OPENING, PASSKEY_QUESTION
from equitape.tasks.needles import first_number

pytestmark = pytest.mark.usefixtures("no_drawing")

KEY = r"pass key is (\d{5})\. Remember"
NUMBER = r"for ([a-z-]+) is: (\d+)(?s:.*)What is the special magic number for \1 "


def run(tmp_path, reader, name, options, **more):
    task = build_evaluation(name, options)
    report = evaluate(evaluated(reader), task, tmp_path / "out", **more)
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    return report, [line["record"] for line in lines]


def test_passkey_of_a_perfect_reader(tmp_path):
    reader = Reader(KEY)
    options = {"lengths": [400, 900], "short": 350, "samples": 2, "depths": [0, 0.5, 1.0], "seed": 3}
    report, records = run(tmp_path, reader, "passkey", options)
    assert {rows[1] for rows in reader.seen} == {350, 400, 900}
    assert report["metrics"]["exact_match"] == 100
    assert report["metrics"]["exact_match_inside"] == report["metrics"]["exact_match_outside"] == 100
    assert report["short"] == {"exact_match_350": 100}
    assert report["grids"][0]["values"] == [[100, 100, 100]] * 3
    keys = [record["expected"] for record in records]
    assert len(set(keys)) == len(keys) == 3 * 3 * 2
    assert all(len(key) == 5 and key.isdigit() for key in keys)
    # another seed, other keys; the same seed, the same
    again = run(tmp_path / "again", Reader(KEY), "passkey", options)[1]
    assert [record["expected"] for record in again] == keys
    other = run(tmp_path / "other", Reader(KEY), "passkey", {**options, "seed": 4})[1]
    assert [record["expected"] for record in other] != keys


def test_passkey_of_a_reader_that_sees_the_end_alone(tmp_path):
    """The heat map has lengths and depths where they belong."""
    reader = Reader(KEY, sight=500)
    report, _ = run(
        tmp_path, reader, "passkey", {"lengths": [2000], "short": 350, "samples": 2, "depths": [0, 0.9, 1.0]}
    )
    grid = report["grids"][0]
    assert (grid["rows"], grid["columns"]) == (["0", "0.9", "1"], ["350", "2000"])
    assert grid["values"] == [[100, 0], [100, 100], [100, 100]]
    assert report["metrics"]["exact_match_inside"] == 100
    assert report["metrics"]["exact_match_outside"] == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (r" \1", True),
        (r": \1. I think", True),
        (r" \g<1>9", False),
        (r" 7\1", False),
        (" none", False),
        (r" 1, \1", False),
    ],
)
def test_passkey_wants_the_number_and_nothing_else(answer, right, tmp_path):
    options = {"lengths": [400], "short": 400, "samples": 1, "depths": [0.5]}
    report, _ = run(tmp_path, Reader(KEY, answer), "passkey", options)
    assert report["metrics"]["exact_match"] == 100 * right


def test_first_number():
    assert first_number("the key is 01234.") == "01234"
    assert first_number("none") == ""


@pytest.mark.parametrize("name", ["passkey", "needles"])
def test_lengths_follow_the_models_context(name, tmp_path):
    reader = Reader("nothing", context=2048)
    units = build_evaluation(name, {"short": 1200}).prepare(evaluated(reader))
    assert sorted({unit.length for unit in units}) == [1200, 2048, 4096]


def test_needles_of_a_reader_that_finds_numbers(tmp_path):
    options = {"lengths": [3000], "short": 1500, "samples": 10}
    report, records = run(tmp_path, Reader(NUMBER, r" \2.", context=2000), "needles", options)
    metrics = report["metrics"]
    assert metrics["single_3000"] == metrics["multikey_1500"] == 100
    # it answers questions for one number alone
    for kind in ("multivalue", "multiquery", "variables", "common_words"):
        assert metrics[f"{kind}_3000"] == 0
    assert metrics["score_1500"] == metrics["score_3000"] == pytest.approx(100 / 3)
    assert report["short"] == {"score_1500": pytest.approx(100 / 3)}
    assert metrics["score_inside"] == metrics["score_outside"] == pytest.approx(100 / 3)
    assert [grid["title"] for grid in report["grids"]] == [
        "Needles by kind, per cent", "Needles, single, per cent", "Needles, multikey, per cent"
    ]  # fmt: skip
    # ten samples lie two in each fifth of the depth
    depths = [record["depth"] for record in records if (record["kind"], record["length"]) == ("single", 3000)]
    assert sorted(int(depth * 10) for depth in depths) == list(range(10))
    assert report["grids"][1]["values"] == [[100, 100]] * 5


def test_needles_give_credit_for_parts(tmp_path):
    """One of four values named: a quarter."""
    report, _ = run(
        tmp_path,
        Reader(r"magic numbers for [a-z-]+ is: (\d+)", r" \1"),
        "needles",
        {"kinds": ["multivalue"], "lengths": [1500], "short": 1500, "samples": 3},
    )
    assert report["metrics"]["multivalue_1500"] == 25


@pytest.mark.parametrize(
    ("name", "options"), [("passkey", {"depths": [0, 0.0, 0.5]}), ("needles", {"kinds": ["single", "single"]})]
)
def test_a_depth_or_kind_given_twice_is_measured_once(name, options, tmp_path):
    task = build_evaluation(name, {"lengths": [700], "short": 700, "samples": 1, **options})
    report = evaluate(evaluated(Reader("nothing")), task, tmp_path)
    assert report["examples"]["units"] == len((tmp_path / "results.jsonl").read_text().splitlines())
    assert not any("Unfinished" in note for note in report["notes"])


def test_answers_do_not_depend_on_the_batch(tmp_path):
    """Common words have different lengths, and so have the answers that may be given."""
    task = build_evaluation("needles", {"kinds": ["common_words"], "lengths": [1400], "short": 1400, "samples": 3})
    written = []
    for batch_tokens in (1, 100_000):
        evaluate(
            evaluated(Reader("Question", answer="x" * 400)),
            task,
            tmp_path / str(batch_tokens),
            batch_tokens=batch_tokens,
        )
        lines = (tmp_path / str(batch_tokens) / "results.jsonl").read_text().splitlines()
        written.append([json.loads(line)["record"]["answer"] for line in lines])
    assert written[0] == written[1]
    assert len(set(map(len, written[0]))) > 1


def test_filler_from_text(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(f"Chapter {number}. It was a dark and stormy night." for number in range(50)))
    reader = Reader(KEY)
    report, _ = run(tmp_path, reader, "passkey", {"lengths": [600], "short": 600, "samples": 2, "filler": str(book)})
    assert report["metrics"]["exact_match"] == 100
    assert "book.txt" in report["protocol"][0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("passkey", {"lengths": [0]}, r"lengths is \[0\]; it must be a list.*from 1 to 100,000,000"),
        ("passkey", {"lengths": [100.5]}, "each a whole number"),
        ("passkey", {"depths": [1.5]}, "each a number from 0 to 1"),
        ("passkey", {"samples": 0}, "samples is 0"),
        ("passkey", {"sample": 1}, "no option 'sample'. Did you mean 'samples'"),
        ("needles", {"kinds": ["multi_key"]}, r"kinds is \['multi_key'\].*Did you mean 'multikey'"),
        ("needles", {"kinds": []}, r"kinds is \[\]"),
        ("needle", {}, "Unknown evaluation task 'needle'. Did you mean 'needles'"),
        ("addition", {}, "Task 'addition' scores the models that are trained on it"),
        ("passkey:x", {}, "has no parts"),
        ("scrolls", {}, "has no part ''"),
        ("scrolls:qmsun", {}, "no part 'qmsun'. Did you mean 'qmsum'"),
        ("lm-eval", {}, "needs the name of a task"),
    ],
)
def test_wrong_tasks_and_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_evaluation(name, options)


@pytest.mark.parametrize("name", ["passkey", "needles"])
def test_a_length_below_the_prompt_is_refused_before_any_work(name, tmp_path):
    reader = Reader("(nothing)")
    with pytest.raises(
        ValueError, match=rf"Task '{name}'.*A prompt of 60 tokens cannot be made.*does for all"
    ) as error:
        evaluate(evaluated(reader), build_evaluation(name, {"lengths": [60, 500]}), tmp_path / "out")
    assert not reader.seen
    assert not (tmp_path / "out").exists()
    # the length that it names does, though other words are drawn for it
    enough = int(re.search(r"A length of (\d+) does", str(error.value)).group(1))
    report, _ = run(tmp_path, reader, name, {"lengths": [enough], "short": enough})
    assert report["notes"] == []


@pytest.mark.parametrize("short", [512, 527, 539, 640])
def test_every_needle_is_measured_before_any_work(short):
    """The words of some samples are longer than those of the first."""
    options = {"kinds": ["multiquery"], "short": short, "lengths": [640, 1024], "samples": 20}
    with pytest.raises(ValueError, match=r"Task 'needles', kind 'multiquery': A prompt of \d+ tokens") as error:
        build_evaluation("needles", options).prepare(evaluated(Reader("x")))
    needed, enough = map(int, re.search(r"up to (\d+)\. A length of (\d+) does", str(error.value)).groups())
    assert short < needed <= enough
    task = build_evaluation("needles", {**options, "short": enough, "lengths": [enough, 1024]})
    units = task.prepare(evaluated(Reader("x")))
    assert {len(task.make(unit.content).tokens) for unit in units} == {enough, 1024}


def test_every_passkey_is_measured_before_any_work():
    """Some numbers take more tokens than the first."""
    numbers = " ".join(str(number) for number in range(10000, 14000, 7))
    who = evaluated(Reader("x", vocab_size=400), train_bpe([Document("numbers", numbers)], 400))
    task = build_evaluation("passkey", {"lengths": [1000], "short": 1000})
    task.prepare(who)
    encode = task.maker.encode

    def sizes(length):
        lines = [PASSKEY.format(key=task.build(place, 1000).references[0]) for place in task.places(length)]
        return [len(encode(PASSKEY_OPENING)) + len(encode(line)) + len(encode(PASSKEY_QUESTION)) for line in lines]

    # a length that the first prompt fits into and another does not
    near = sizes(1000)
    length = next(n for n in range(min(near), max(near)) if sizes(n)[0] <= n < max(sizes(n)))
    needed = max(sizes(length))
    with pytest.raises(ValueError, match=rf"A prompt of {length} tokens cannot be made.*take up to {needed}\."):
        build_evaluation("passkey", {"lengths": [length], "short": 1000}).prepare(who)


def test_the_short_length_is_what_the_tokenizer_needs(tmp_path):
    """Byte-level models too are measured without options, and the report says at which length."""
    options = {"lengths": [1000], "samples": 3}
    report, records = run(tmp_path, Reader(NUMBER, r" \2."), "needles", options)
    short = report["options"]["short"]
    assert 512 < short < 1000
    assert short % 64 == 0
    assert {record["length"] for record in records} == {short, 1000}
    assert list(report["short"]) == [f"score_{short}"]
    assert report["notes"] == [
        f"The short length is {short} tokens instead of 512: prompts of 512 of this tokenizer do not hold what must be "
        f"in them."
    ]
    assert rescore(tmp_path / "out") == report
    again = evaluate(evaluated(Reader(NUMBER)), build_evaluation("needles", options), tmp_path / "out", resume=True)
    assert again["metrics"] == report["metrics"]
    # 512 is kept if it is enough, without a note
    few, _ = run(tmp_path / "few", Reader(NUMBER), "needles", {**options, "kinds": ["single"]})
    assert (few["options"]["short"], few["notes"]) == (512, [])
    assert "short_raised" not in few["examples"]
    # what was given is not changed
    given, _ = run(tmp_path / "given", Reader(NUMBER), "needles", {**options, "kinds": ["single"], "short": 360})
    assert list(given["short"]) == ["score_360"]


def test_default_lengths_begin_where_all_prompts_fit():
    units = build_evaluation("needles").prepare(evaluated(Reader("x", context=4096)))
    assert sorted({unit.length for unit in units})[1:] == [1024, 2048, 4096, 8192]
    units = build_evaluation("passkey").prepare(evaluated(Reader("x", context=4096)))
    assert sorted({unit.length for unit in units}) == [512, 1024, 2048, 4096, 8192]


def test_filler_without_words_is_refused(tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n \n")
    with pytest.raises(ValueError, match=r"The filler '.*blank.txt' holds no words; name a text that does"):
        build_evaluation("passkey", {"filler": str(tmp_path / "blank.txt")}).prepare(evaluated(Reader("x")))


def test_missing_filler_is_refused(tmp_path):
    with pytest.raises(ValueError, match="There is no file or folder"):
        build_evaluation("passkey", {"filler": str(tmp_path / "none")}).prepare(evaluated(Reader("x")))


def test_reports_are_made_again_without_a_model(tmp_path):
    report, _ = run(tmp_path, Reader(KEY), "passkey", {"lengths": [400], "short": 400, "samples": 1})
    folder = tmp_path / "out"
    report_folder(folder)
    page, picture = (folder / "report.md").read_text(), next(folder.glob("*.png")).read_bytes()
    for path in (*folder.glob("*.png"), folder / "report.md", folder / "report.json"):
        path.unlink()
    assert rescore(folder) == report
    report_folder(folder)
    assert (folder / "report.md").read_text() == page
    assert next(folder.glob("*.png")).read_bytes() == picture
    assert "At short lengths" in page
    assert "exact match 400" in page
