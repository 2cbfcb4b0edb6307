"""Runs that are interrupted, out of memory, refused, or shown side by side."""

import io
import json

import pytest
import torch
from rich.console import Console
from small import Reader, evaluated, llama, our_model

from equitape.data.tokenizers import byte_tokenizer
from equitape.evaluation import build_evaluation, evaluate, rescore
from equitape.evaluation.runner import add_cost
from equitape.report.evaluation import report_folder

pytestmark = pytest.mark.usefixtures("no_drawing")

KEY = r"pass key is (\d{5})\. Remember"
OPTIONS = {"lengths": [400, 600], "short": 400, "samples": 3, "depths": [0, 1]}


class Interrupted(Reader):
    """Is stopped, as by Ctrl-C, when it is asked for the count-th time."""

    def __init__(self, count, error=KeyboardInterrupt, **more):
        super().__init__(KEY, **more)
        self.left, self.error = count, error

    def generate(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().generate(*args, **kwargs)


def passkey(**changes):
    return build_evaluation("passkey", {**OPTIONS, **changes})


def lines(folder):
    return (folder / "results.jsonl").read_text().splitlines()


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    whole = evaluate(evaluated(Reader(KEY)), passkey(), tmp_path / "whole", batch_tokens=1200)
    folder = tmp_path / "part"
    with pytest.raises(KeyboardInterrupt):
        evaluate(evaluated(Interrupted(3)), passkey(), folder, batch_tokens=1200)
    # two batches of two prompts of 600 tokens were done
    assert len(lines(folder)) == 4
    kept = lines(folder)
    # and a line that was being written
    with (folder / "results.jsonl").open("a") as file:
        file.write('{"unit": "400/0')
    reader = Interrupted(100)
    report = evaluate(evaluated(reader), passkey(), folder, resume=True, batch_tokens=1200)
    assert sum(rows for rows, _ in reader.seen) == 12 - 4
    assert lines(folder)[:4] == kept
    assert sorted(lines(folder)) == sorted(lines(tmp_path / "whole"))
    assert report["metrics"] == whole["metrics"]
    # what the part before cost is counted too
    assert report["cost"]["tokens"] == whole["cost"]["tokens"] == 6 * (400 + 600)
    # nothing is left to do
    reader = Interrupted(100)
    assert evaluate(evaluated(reader), passkey(), folder, resume=True)["metrics"] == whole["metrics"]
    assert not reader.seen


def test_a_run_with_other_settings_is_refused(tmp_path):
    folder = tmp_path / "out"
    evaluate(evaluated(Reader(KEY)), passkey(), folder)
    before = lines(folder)
    with pytest.raises(ValueError, match="already holds this evaluation; continue it with --resume"):
        evaluate(evaluated(Reader(KEY)), passkey(), folder)
    with pytest.raises(ValueError, match=r"already holds a different evaluation \(options.samples was 3, now 5"):
        evaluate(evaluated(Reader(KEY)), passkey(samples=5), folder, resume=True)
    with pytest.raises(ValueError, match=r"already holds a different evaluation \(task was passkey, now needles"):
        evaluate(
            evaluated(Reader(KEY, context=3000)), build_evaluation("needles", {"short": 2000}), folder, resume=True
        )
    other = Reader(KEY)
    torch.nn.init.constant_(other.embedding.weight, 3.0)
    with pytest.raises(ValueError, match=r"already holds a different evaluation \(model.weights was"):
        evaluate(evaluated(other), passkey(), folder, resume=True)
    assert lines(folder) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        evaluate(evaluated(Reader(KEY)), passkey(), tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thing").write_text("")
    with pytest.raises(ValueError, match="is not empty and has no evaluation"):
        evaluate(evaluated(Reader(KEY)), passkey(), tmp_path / "full")


def test_a_model_with_the_same_weights_and_other_settings_is_refused(tmp_path):
    options = {"lengths": [700], "short": 700, "samples": 1, "depths": [0.5]}
    evaluate(evaluated(llama()), passkey(**options), tmp_path)
    before = lines(tmp_path)
    other = llama()
    other.config.rope_parameters["rope_theta"] = 100.0
    with pytest.raises(
        ValueError, match=r"already holds a different evaluation \(config.rope_parameters.rope_theta was"
    ):
        evaluate(evaluated(other), passkey(**options), tmp_path, resume=True)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token
    with pytest.raises(ValueError, match=r"already holds a different evaluation \(tokenizer was"):
        evaluate(evaluated(llama(), tokenizer), passkey(**options), tmp_path, resume=True)
    # an evaluation of an older version, which kept neither, goes on
    settings = json.loads((tmp_path / "settings.json").read_text())
    (tmp_path / "settings.json").write_text(
        json.dumps({name: value for name, value in settings.items() if name not in ("config", "tokenizer")})
    )
    evaluate(evaluated(llama()), passkey(**options), tmp_path, resume=True)
    assert lines(tmp_path) == before


@pytest.mark.parametrize(
    "change", [{"task": 7}, {"options": None}, {"examples": {}}, {"model": {}}, {"model": None}], ids=str
)
def test_damaged_settings_are_refused_in_one_sentence(change, tmp_path):
    evaluate(evaluated(Reader(KEY)), passkey(), tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text())
    (tmp_path / "settings.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(ValueError, match="has no readable evaluation"):
        rescore(tmp_path)


def test_results_that_are_not_of_the_evaluation_are_refused(tmp_path):
    evaluate(evaluated(Reader(KEY)), passkey(), tmp_path)
    kept = lines(tmp_path)
    (tmp_path / "results.jsonl").write_text("\n".join([*kept, kept[0].replace("/0.0/0", "/0.5/0")]) + "\n")
    with pytest.raises(ValueError, match=r"results\.jsonl also has results of another evaluation"):
        rescore(tmp_path)
    (tmp_path / "results.jsonl").write_text('{"unit": "400/0.0/0", "record": 5}\n')
    with pytest.raises(ValueError, match=r"Line 1 of .*results\.jsonl is damaged"):
        rescore(tmp_path)


def test_text_that_changed_is_another_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 10)
    options = {"data": str(text), "lengths": [16], "short": 8}
    who = evaluated(our_model())
    evaluate(who, build_evaluation("perplexity", options), tmp_path / "out")
    moved = tmp_path / "moved.txt"
    moved.write_text(text.read_text())
    named = {**options, "data": {"text.txt": str(moved)}}
    # the same text elsewhere is the same text
    evaluate(who, build_evaluation("perplexity", named), tmp_path / "out", resume=True)
    moved.write_text("hgfedcba" * 10)
    with pytest.raises(ValueError, match=r"already holds a different evaluation \(examples.data.text.txt was"):
        evaluate(who, build_evaluation("perplexity", named), tmp_path / "out", resume=True)


@pytest.mark.parametrize(("name", "own"), [("passkey", {"depths": [0.5]}), ("needles", {"kinds": ["single"]})])
def test_filler_that_changed_is_another_evaluation(name, own, tmp_path):
    filler = tmp_path / "filler.txt"
    options = {"lengths": [700], "short": 700, "samples": 1, "filler": str(filler), **own}
    filler.write_text("The sea was calm. We sailed on.\n" * 40)
    first = evaluate(evaluated(Reader(KEY)), build_evaluation(name, options), tmp_path / "out")
    again = evaluate(evaluated(Reader(KEY)), build_evaluation(name, options), tmp_path / "out", resume=True)
    assert again["metrics"] == first["metrics"]
    filler.write_text("The sun was bright. We walked on.\n" * 40)
    with pytest.raises(ValueError, match=r"already holds a different evaluation \(examples.filler was"):
        evaluate(evaluated(Reader(KEY)), build_evaluation(name, options), tmp_path / "out", resume=True)


def test_costs_add_up(tmp_path):
    """Over batches, and over a run that was interrupted and went on."""
    for tokens, seconds in ((100, 1.0), (30, 0.5), (7, 2.0)):
        add_cost(tmp_path, evaluated(Reader(KEY)), tokens, seconds, {"torch": "2"})
    cost = json.loads((tmp_path / "cost.json").read_text())
    assert cost == {"seconds": 3.5, "tokens": 137, "peak_mib": None, "environment": {"torch": "2"}}


class Tight(Reader):
    """Has memory for so many tokens at once."""

    def __init__(self, tokens):
        super().__init__(KEY)
        self.tokens = tokens
        self.tried = []

    def generate(self, tokens, *args, **kwargs):
        self.tried.append(tokens.numel())
        if tokens.numel() > self.tokens:
            raise torch.OutOfMemoryError("full")
        return super().generate(tokens, *args, **kwargs)


def test_batches_shrink_until_they_fit(tmp_path):
    reader = Tight(1300)
    report = evaluate(evaluated(reader), passkey(), tmp_path / "out")
    assert report["metrics"]["exact_match"] == 100
    assert reader.tried[0] == 3600
    # once it is known what fits, nothing larger is tried
    assert sum(size > 1300 for size in reader.tried) <= 2
    assert not any("failed" in note for note in report["notes"])


def test_what_never_fits_is_reported(tmp_path):
    report = evaluate(evaluated(Tight(450)), passkey(), tmp_path / "out")
    assert report["metrics"]["exact_match_400"] == 100
    assert "exact_match_600" not in report["metrics"]
    assert "6 units failed: 600 tokens do not fit in memory." in report["notes"]
    # more memory: only what failed is tried again
    reader = Tight(10**6)
    report = evaluate(evaluated(reader), passkey(), tmp_path / "out", resume=True)
    assert {length for _, length in reader.seen} == {600}
    assert report["metrics"]["exact_match_600"] == 100
    assert not any("failed" in note for note in report["notes"])


def test_nothing_done_at_all_is_an_error(tmp_path):
    with pytest.raises(
        ValueError, match=r"has no results: 600 tokens do not fit|has no results: 400 tokens do not fit"
    ):
        evaluate(evaluated(Tight(10)), passkey(), tmp_path / "out")


def test_a_report_of_half_a_run_says_so(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        evaluate(evaluated(Interrupted(2)), passkey(), tmp_path / "out", batch_tokens=1200)
    report = rescore(tmp_path / "out")
    assert report["notes"][0] == "Unfinished: 10 of 12 units are missing."


def test_two_models_side_by_side(tmp_path):
    evaluate(evaluated(Reader(KEY), name="all"), passkey(), tmp_path / "all")
    evaluate(evaluated(Reader(KEY, sight=200), name="end"), passkey(), tmp_path / "end")
    report = rescore(tmp_path / "end")
    report_folder(tmp_path / "end", {"original": tmp_path / "all"})
    page = (tmp_path / "end/report.md").read_text()
    assert "| metric | end | original |" in page
    assert "| exact match 600, % ↑ | 50.00 | 100.00 |" in page
    # what the longer context cost at a short length
    assert "| exact match 400, % ↑ | 50.00 | 100.00 | -50 |" in page
    assert "change from original" in page
    assert report["model"]["name"] == "end"
    with pytest.raises(ValueError, match="Two models are called 'end'"):
        report_folder(tmp_path / "end", {"end": tmp_path / "all"})
    evaluate(evaluated(Reader(KEY)), passkey(samples=1), tmp_path / "other")
    with pytest.raises(ValueError, match=r"Cannot compare with the evaluation in .*: options.samples was 1, now 3"):
        report_folder(tmp_path / "end", {"other": tmp_path / "other"})
    with pytest.raises(ValueError, match="There is no report to compare with"):
        report_folder(tmp_path / "end", {"x": tmp_path / "nothing"})


def test_reports_say_how_they_were_made(tmp_path):
    report = evaluate(evaluated(our_model()), passkey(lengths=[400], samples=1), tmp_path / "out")
    assert json.loads((tmp_path / "out/report.json").read_text()) == report
    assert report["model"]["encoding"]["kind"] == "tape"
    assert report["model"]["dtype"] == "float64"
    assert report["cost"]["tokens"] == 2 * 400
    assert report["cost"]["seconds"] > 0
    assert {"torch", "device", "commit", "date"} <= set(report["environment"])
    report_folder(tmp_path / "out")
    page = (tmp_path / "out/report.md").read_text()
    for words in ("option samples", "model weights", "torch", "exactly the stated number of tokens"):
        assert words in page


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[]"])
def test_a_folder_without_an_evaluation(content, tmp_path):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(ValueError, match="has no readable evaluation"):
        rescore(tmp_path)


def test_the_context_of_a_model_is_the_length_it_was_trained_on():
    """A model built to be scored at eight times that length announces room for it, and is not meant for it."""
    model = our_model("rope", max_position_embeddings=512, trained_length=64)
    assert evaluated(model).context == 64
    assert evaluated(our_model("rope", max_position_embeddings=512)).context == 512


def test_progress_is_a_line_per_minute_without_a_terminal(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr("equitape.evaluation.runner.time.monotonic", lambda: float(next(clock)))
    console = Console(file=io.StringIO(), width=100)
    evaluate(
        evaluated(Reader(KEY)), passkey(lengths=[400], samples=5), tmp_path / "out", batch_tokens=1, console=console
    )
    lines = console.file.getvalue().splitlines()
    # five batches or more of 25 seconds each
    assert len(lines) >= 1
    assert lines[0].startswith("passkey: ")
    assert "%" in lines[0]
    assert " left" in lines[0]
