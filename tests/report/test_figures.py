"""The numbers behind the sentences, cells and pictures of a report, each against arithmetic by hand."""

import math
from unittest.mock import Mock

import pytest
from made_up import make_results, make_run
from matplotlib.axes import Axes

from equitape.report.plots import draw_spreads, numbered_style, plot_curve, plot_heat_maps
from equitape.report.summary import Spread, curve_spreads, summarise
from equitape.report.tables import runs_table
from equitape.report.write import findings


def summary_of(values, change, **task):
    """Of encodings a, b, ... with a run for each value, which `change` writes into its evaluation."""
    runs = []
    for label, scores in values.items():
        for seed, score in enumerate(scores):
            run = make_run(label, seed, 1.0)
            change(run["evaluation"], score)
            runs.append(run)
    results = make_results()
    return summarise({**results, "runs": runs, "task": {**results["task"], **task}})


@pytest.mark.parametrize(
    ("higher", "values", "first"),
    [
        (True, {"a": [10, 11, 12], "b": [1, 2, 3]}, "a leads with points 11.00"),
        (False, {"a": [10, 11, 12], "b": [1, 2, 3]}, "b leads with points 2.000"),
        # too close to be marked, yet one of them has the better mean
        (True, {"a": [1, 2, 3], "b": [2, 3, 4]}, "b comes first with points 3.000"),
        (False, {"a": [2, 3, 4], "b": [1, 2, 3]}, "b comes first with points 2.000"),
        (False, {"a": [3], "b": [2], "c": [4]}, "b comes first with points 2.000"),
    ],
)
def test_the_encoding_named_first_has_the_best_mean(higher, values, first):
    def change(evaluation, score):
        evaluation["metrics"] = {"points": score}

    summary = summary_of(values, change, headline="points", higher_is_better=higher)
    assert findings(summary)[0].startswith(first)


@pytest.mark.parametrize(
    ("metric", "higher"),
    [
        ("loss", False),
        ("answer_loss", False),
        ("valid_perplexity", False),
        ("outside_bits_per_byte", False),
        ("Token_NLL", False),
        ("token_accuracy", True),
        ("mean_F1", True),
        ("tokens", None),
    ],
)
def test_direction_is_told_by_a_word_anywhere_in_a_name(metric, higher):
    assert summarise(make_results()).higher_is_better(metric) is higher


def test_last_loss_of_a_run_and_its_step():
    results = make_results()
    results["runs"] = [make_run(label, 0, 1.0) for label in ("rope", "tape", "nope")]
    for run, log in zip(results["runs"], ([[1, 9.0], [7, 2.0]], [[4000, 0.5]], []), strict=True):
        run["log"] = log
    table = runs_table(summarise(results))
    place = table.columns.index("last loss at step")
    assert [row[place].text for row in table.rows] == ["2.000 at 7", "0.5000 at 4,000", "-"]


def heat_map(values):
    return {
        "title": "exact match",
        "row_label": "digits of the first operand",
        "rows": list(range(1, len(values) + 1)),
        "column_label": "digits of the second operand",
        "columns": list(range(1, len(values[0]) + 1)),
        "values": values,
    }


def test_heat_maps_are_means_over_seeds(monkeypatch):
    def change(evaluation, values):
        evaluation["heat_maps"] = [heat_map(values)]

    drawn, show = [], Axes.imshow

    def noted(self, grid, **options):
        drawn.append(grid)
        return show(self, grid, **options)

    monkeypatch.setattr(Axes, "imshow", noted)
    maps = {"a": [[[0.0, 0.5]], [[1.0, 0.25]]], "b": [[[0.2, None]], [[0.4, None]], [[None, None]]]}
    plot = plot_heat_maps(summary_of(maps, change), "exact match")
    assert plot.alt.endswith("Mean over all cells: a 0.438; b 0.3.")
    (first,), (second,) = drawn
    assert first == [0.5, 0.375]
    assert second[0] == pytest.approx(0.3)
    assert math.isnan(second[1])


def test_bands_reach_from_the_lowest_to_the_highest_seed():
    seeds = {1.0: (5.0, 1.0, 3.0), 2.0: (2.0, 8.0, 5.0), 4.0: (7.0,)}
    axes = Mock()
    draw_spreads(axes, [(x, Spread(values=values)) for x, values in seeds.items()], numbered_style(0, "rope"))
    assert axes.plot.call_args.args == ([1.0, 2.0, 4.0], [3.0, 5.0, 7.0])
    assert axes.fill_between.call_args.args == ([1.0, 2.0, 4.0], [1.0, 2.0, 7.0], [5.0, 8.0, 7.0])
    alone = Mock()
    draw_spreads(alone, [(1.0, Spread(values=(5.0,)))], numbered_style(0, "rope"))
    alone.fill_between.assert_not_called()


def test_curves_of_other_places_are_joined_in_order():
    curves = [{"x": [4, 8], "y": [1.0, 2.0]}, {"x": [2, 4], "y": [5.0, 3.0]}, {"x": [8, 1], "y": [None, 7.0]}]
    points = [(x, spread.values) for x, spread in curve_spreads(curves)]
    assert points == [(1, (7.0,)), (2, (5.0,)), (4, (1.0, 3.0)), (8, (2.0,))]

    def change(evaluation, curve):
        evaluation["curves"] = [{"title": "loss by length", "x_label": "letters", "y_label": "loss", **curve}]

    plot = plot_curve(summary_of({"a": curves}, change), "loss by length")
    assert plot.alt.endswith("mean over seeds: a 7.000 at 1, 2.000 at 8.")
