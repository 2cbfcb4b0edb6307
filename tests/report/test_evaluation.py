"""Bars and curves: what is drawn, and its text for screen readers."""

import math
from io import StringIO

import pytest
from rich.console import Console

from equitape.report.evaluation import (
    contexts_note,
    figures_table,
    notes_of,
    print_report,
    short_table,
    write_evaluation,
)
from equitape.report.evaluation_plots import MOST_ROWS, evaluation_plots
from equitape.report.numbers import number
from equitape.report.style import HATCHES, heading, series_styles
from equitape.runs.results import EvaluationReport
from equitape.tasks.harness import bars_of


def make(context=None, encoding=None, **parts):
    content = {
        "task": "t", "options": {}, "examples": {}, "headline": "score", "protocol": ["How."], "metrics": {"score": 1.0},
        "model": {"name": "one", "context": context, "encoding": encoding}, **parts,
    }  # fmt: skip
    return EvaluationReport.from_dict(content)


def report(**bars):
    entry = {
        "row_label": "task",
        "value_label": "acc",
        "counts": None,
        "errors": None,
        "most": 1.0,
        "title": "t",
        **bars,
    }
    return make(bars=[entry])


def test_models_stand_side_by_side_with_different_hatches():
    first = report(rows=["a", "b"], values=[0.25, 0.5])
    second = report(rows=["b", "c"], values=[0.75, None])
    (plot,) = evaluation_plots({"one": first, "two": second})
    assert plot.alt == "Bar chart of acc by task. one: a 0.2500, b 0.5000; two: b 0.7500."
    assert plot.png.startswith(b"\x89PNG")
    # distinguishable without colour
    assert "url(#bars-t-h" in plot.svg
    assert "url(#" not in evaluation_plots({"one": first})[0].svg.replace("url(#bars-t-p", "")
    assert len(set(HATCHES)) == len(HATCHES)
    styles = series_styles(dict.fromkeys(f"model {index}" for index in range(5)))
    assert len({style.hatch for style in styles.values()}) == 5


def test_many_rows_are_cut_and_counted():
    rows = [f"task{number}" for number in range(MOST_ROWS + 5)]
    (plot,) = evaluation_plots({"one": report(rows=rows, values=[0.5] * len(rows))})
    assert plot.alt.endswith(f"Shows the first {MOST_ROWS} of {MOST_ROWS + 5} rows.")


def test_a_value_beyond_the_most_widens_the_axis():
    inside = evaluation_plots({"one": report(rows=["a"], values=[0.9])})[0]
    beyond = evaluation_plots({"one": report(rows=["a"], values=[0.9]), "two": report(rows=["a"], values=[1.4])})[0]
    assert ">1.4<" not in inside.svg
    assert ">1.4<" in beyond.svg


def curve_report(context, ys):
    curve = {"title": "c", "x_label": "tokens", "y_label": "loss", "x": [256, 1024, 4096], "y": ys}
    return make(context, curves=[curve])


def test_every_context_is_marked_with_its_model():
    """The first model's alone would say of the others that they were trained so far."""
    reports = {"tape": curve_report(1024, [3, 2, 4]), "original": curve_report(512, [3, 4, 5])}
    (plot,) = evaluation_plots(reports)
    assert "trained up to here" not in plot.svg
    assert all(f">context of {name}<" in plot.svg for name in ("tape", "original"))
    assert plot.alt.endswith("Lines where contexts end: 512 of original; 1024 of tape.")
    reports |= {"lora": curve_report(1024, [3, 2, 4]), "theta": curve_report(1024, [3, 2, 4])}
    (plot,) = evaluation_plots(reports)
    assert ">context of 3 models<" in plot.svg
    assert plot.alt.endswith("1024 of tape, lora, theta.")


def test_one_context_is_marked_once_and_none_beyond_the_curve():
    same = {"tape": curve_report(1024, [3, 2, 4]), "lora": curve_report(1024, [3, 4, 5])}
    assert evaluation_plots(same)[0].svg.count("trained up to here") == 1
    beyond = {"tape": curve_report(8192, [3, 2, 4]), "none": curve_report(None, [3, 4, 5])}
    (plot,) = evaluation_plots(beyond)
    assert "context of" not in plot.svg
    assert "contexts end" not in plot.alt


def test_intervals_stand_next_to_figures_and_as_bars_in_curves(tmp_path):
    curve = {"title": "c", "x_label": "tokens", "y_label": "perplexity", "x": [8, 16], "y": [5.0, 4.0]}
    known = make(curves=[{**curve, "low": [4.5, 3.5], "high": [5.5, 4.5]}], intervals={"score": [0.25, 1.75]})
    write_evaluation(known, {}, tmp_path)
    assert "(0.2500 to 1.750)" in (tmp_path / "report.md").read_text()
    for name in ("report.md", "report.html"):
        shown = (tmp_path / name).read_text()
        assert "Intervals are 95 % confidence intervals over documents." in shown
        assert "Bars are 95 % confidence intervals over documents." in shown
    (drawn,), (bare,) = evaluation_plots({"one": known}), evaluation_plots({"one": make(curves=[curve])})
    assert "LineCollection" in drawn.svg
    assert "LineCollection" not in bare.svg
    console = Console(file=StringIO(), width=120)
    print_report(known.to_dict() | {"environment": {"device": "cpu"}, "cost": {"seconds": 1.0}}, tmp_path, console)
    # with unit and direction, as in the pages
    assert "score, % ↑" in console.file.getvalue()
    assert "1.00 (0.2500 to 1.750)" in console.file.getvalue()
    assert "over documents" in console.file.getvalue()


def test_metrics_of_the_harness_by_scale():
    """A picture a metric, its standard errors among it."""
    found = bars_of(
        {
            "a": {"acc": 0.5, "acc_stderr": 0.1, "exact_match,strict": 0.2, "exact_match_stderr,strict": 0.05},
            "b": {"acc": 0.25, "word_perplexity": 31.0},
        }
    )
    acc, match, perplexity = found
    assert (acc.rows, acc.values, acc.most) == (["a", "b"], [0.5, 0.25], 1.0)
    assert acc.errors[0] == 0.1
    assert math.isnan(acc.errors[1])
    assert (match.value_label, match.errors) == ("exact_match,strict", [0.05])
    assert (perplexity.rows, perplexity.most, perplexity.errors) == (["b"], None, None)
    # NaN is null in a file
    (missing,) = bars_of({"a": {"acc": None, "acc_stderr": None}})
    assert math.isnan(missing.values[0])
    assert missing.errors is None


@pytest.mark.parametrize(("value", "text"), [(8, "8"), (1234, "1,234"), (8.0, "8.000"), (None, "-"), (0, "0")])
def test_counts_are_shown_whole(value, text):
    assert number(value) == text


def test_models_of_different_contexts_are_marked():
    reports = {name: make(context) for name, context in (("a", 64), ("b", 4096), ("c", None))}
    assert "Contexts differ (a 64, b 4,096, c unknown)" in contexts_note(reports)[0]
    assert contexts_note({"a": reports["a"], "d": reports["a"]}) == []


def test_a_note_of_several_models_is_written_once():
    reports = {"a": make(notes=["Same.", "Two."]), "b": make(notes=["Same.", "Two."]), "c": make(notes=["Same."])}
    assert notes_of(reports) == ["Same.", "a, b: Two."]


def test_page_holds_everything(tmp_path):
    """Tables, plots and notes of all models, in one file that fetches nothing."""
    bars = {"title": "b", "row_label": "task", "rows": ["x"], "value_label": "acc", "values": [0.5], "errors": [0.1]}
    one = make(64, {"kind": "tape"}, bars=[bars], metrics={"score": 12.345, "loss": 2.0}, notes=["Cut <here>."])
    write_evaluation(one, {"two": make(64, {"kind": "rope"}, bars=[bars], metrics={"score": 50.0})}, tmp_path)
    page, text = ((tmp_path / name).read_text() for name in ("report.html", "report.md"))
    assert "Cut &lt;here&gt;." in page
    for shown in (page, text):
        for words in ("12.3", "50.00", "score, % ↑", "loss ↓", "How.", "Error bars are standard errors."):
            assert words in shown
    assert page.count("<svg") == 1
    assert "http" not in page.replace("http://www.w3.org", "")
    assert (tmp_path / "bars-b.png").exists()


def test_figures_that_the_first_model_lacks_are_shown():
    """The score of cut documents exists only for models whose tokens did not fit."""
    one = make(metrics={"loss": 2.0, "score": 12.0}, short={})
    two = make(metrics={"score": 50.0, "score_cut": 25.0}, short={"score_8": 1.0})
    assert [[cell.text for cell in row] for row in figures_table({"one": one, "two": two}).rows] == [
        ["score, % ↑", "12.00", "50.00"],
        ["loss ↓", "2.000", "-"],
        ["score cut, % ↑", "-", "25.00"],
    ]
    assert [[cell.text for cell in row] for row in short_table({"one": one, "two": two}).rows] == [
        ["score 8, % ↑", "-", "1.00", "-"]
    ]


def test_changes_from_many_models_need_no_columns():
    reports = {name: make(short={"score_8": value}) for name, value in zip("abcd", (1.0, 2.0, 4.0, None), strict=True)}
    table = short_table(reports)
    assert table.columns == ["metric", "a", "b", "c", "d"]
    assert [cell.detail for cell in table.rows[0]] == ["", "", "-1", "-3", "-"]
    assert table.notes == ["With each value, the change from it to a."]
    few = short_table({name: reports[name] for name in "abc"})
    assert few.columns == ["metric", "a", "b", "c", "change from b", "change from c"]
    assert [cell.text for cell in few.rows[0][4:]] == ["-1", "-3"]
    assert not few.notes


def test_headings_name_the_sets_of_scrolls():
    assert heading("qmsum: score by length of the document") == "QMSum: score by length of the document"
    assert heading("exact match") == "Exact match"
