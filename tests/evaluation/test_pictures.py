"""Bars and curves: what is drawn, and told to those who cannot see it."""

import math

import pytest

from equitape.evaluation.harness import bars_of
from equitape.evaluation.pictures import COLOURS, HATCHES, MOST_ROWS, draw
from equitape.evaluation.write import show


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
    return {"grids": [], "curves": [], "bars": [entry], "model": {"context": None}}


def test_models_stand_side_by_side_with_hatches_of_their_own(tmp_path):
    first = report(rows=["a", "b"], values=[0.25, 0.5])
    second = report(rows=["b", "c"], values=[0.75, None])
    (plot,) = draw({"one": first, "two": second}, tmp_path)
    assert plot.alt == "Bar chart of acc by task. one: a 0.2500, b 0.5000; two: b 0.7500."
    assert (tmp_path / "bars-t.png").read_bytes() == plot.png
    # told apart without colour
    assert "url(#bars-t-h" in plot.svg
    assert "url(#" not in draw({"one": first}, tmp_path)[0].svg.replace("url(#bars-t-p", "")
    assert len(set(HATCHES)) == len(HATCHES)
    # as many pairs of colour and hatch as both allow
    assert len({(n % len(COLOURS), n % len(HATCHES)) for n in range(30)}) == 30


def test_many_rows_are_cut_and_told(tmp_path):
    rows = [f"task{number}" for number in range(MOST_ROWS + 5)]
    (plot,) = draw({"one": report(rows=rows, values=[0.5] * len(rows))}, tmp_path)
    assert plot.alt.endswith(f"The first {MOST_ROWS} of {MOST_ROWS + 5} rows.")


def test_a_value_beyond_the_most_widens_the_axis(tmp_path):
    inside = draw({"one": report(rows=["a"], values=[0.9])}, tmp_path)[0]
    beyond = draw({"one": report(rows=["a"], values=[0.9]), "two": report(rows=["a"], values=[1.4])}, tmp_path)[0]
    assert ">1.4<" not in inside.svg
    assert ">1.4<" in beyond.svg


def curve_report(context, ys):
    curve = {"title": "c", "x_label": "tokens", "y_label": "loss", "x": [256, 1024, 4096], "y": ys}
    return {"grids": [], "curves": [curve], "bars": [], "model": {"context": context}}


def test_every_context_is_marked_and_told_whose_it_is(tmp_path):
    """The first model's alone would say of the others that they were trained so far."""
    reports = {"tape": curve_report(1024, [3, 2, 4]), "original": curve_report(512, [3, 4, 5])}
    (plot,) = draw(reports, tmp_path)
    assert "trained up to here" not in plot.svg
    assert all(f">context of {name}<" in plot.svg for name in ("tape", "original"))
    assert plot.alt.endswith("Lines where contexts end: 512 of original; 1024 of tape.")
    reports |= {"lora": curve_report(1024, [3, 2, 4]), "theta": curve_report(1024, [3, 2, 4])}
    (plot,) = draw(reports, tmp_path)
    assert ">context of 3 models<" in plot.svg
    assert plot.alt.endswith("1024 of tape, lora, theta.")


def test_one_context_is_marked_once_and_none_beyond_the_curve(tmp_path):
    same = {"tape": curve_report(1024, [3, 2, 4]), "lora": curve_report(1024, [3, 4, 5])}
    assert draw(same, tmp_path)[0].svg.count("trained up to here") == 1
    beyond = {"tape": curve_report(8192, [3, 2, 4]), "none": curve_report(None, [3, 4, 5])}
    (plot,) = draw(beyond, tmp_path)
    assert "context of" not in plot.svg
    assert "contexts end" not in plot.alt


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


@pytest.mark.parametrize(("value", "text"), [(8, "8"), (1234, "1,234"), (8.0, "8.000"), (None, "-"), (0, "0")])
def test_counts_are_shown_whole(value, text):
    assert show(value) == text
