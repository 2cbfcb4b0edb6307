"""The numbers behind the sentences, cells and pictures of a report, each against arithmetic by hand."""

import base64
import io
import itertools
import math
import re
from unittest.mock import Mock

import numpy as np
import pytest
from made_up import make_results, make_run
from matplotlib.axes import Axes
from matplotlib.image import imread
from matplotlib.text import Text

from equitape.report import summary as summaries
from equitape.report.charts import Line, LinePanel, draw_line, line_figure, log_bins
from equitape.report.comparison import findings
from equitape.report.comparison_plots import in_log_bins, plot_curve, plot_heat_maps, spread_line
from equitape.report.comparison_tables import runs_table
from equitape.report.heat_maps import MapPanel, MapStyle, fit_lines, heat_maps
from equitape.report.style import NO_VALUE, series_styles, spread_out
from equitape.report.summary import Spread, curve_spreads
from equitape.runs.results import Comparison, Curve, Metric, TaskResult


def summarise(results):
    return summaries.summarise(Comparison.from_dict(results))


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


def test_direction_and_unit_are_the_declared_ones():
    results = make_results()
    declared = Metric(name="points", higher_is_better=False, unit="km")
    task = TaskResult.from_dict({**results["task"], "metrics": [vars(declared)]})
    summary = summaries.summarise(Comparison.from_dict({**results, "task": task.to_dict()}))
    assert (summary.higher_is_better("points_outside"), summary.unit("points_outside")) == (False, "km")
    assert summary.higher_is_better("digits") is None
    # files from before metrics were declared
    assert summarise(results).higher_is_better("perplexity_1x") is False
    assert summarise(results).higher_is_better("token_accuracy_outside") is True


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
    assert plot.alt.endswith("Mean over all cells: a 43.75; b 30.00.")
    (first,), (second,) = drawn
    assert list(first) == [50.0, 37.5]
    assert second[0] == pytest.approx(30.0)
    assert math.isnan(second[1])


def test_cells_without_a_value_are_grey_on_pages_and_in_files():
    """Pages have transparent pictures, whose cells are an image inside the SVG."""
    style = MapStyle(row_label="depth", column_label="tokens", limits=(0.0, 1.0), size=(2.0, 1.5))
    shown = [
        heat_maps("map", "a map", [MapPanel(title="a", values=np.array([[0.0, 1.0, value]]))], style, alt="a map")
        for value in (math.nan, 0.5)
    ]
    for plot, missing in zip(shown, (True, False), strict=True):
        cells, *_ = re.findall(r"data:image/png;base64,\s*([^\"]+)", plot.svg)
        for content in (base64.b64decode(cells), plot.png):
            pixels = np.rint(255 * imread(io.BytesIO(content))[..., :3]).astype(int).reshape(-1, 3)
            grey = tuple(int(NO_VALUE[start : start + 2], 16) for start in (1, 3, 5))
            assert (pixels == grey).all(axis=1).any() == missing


@pytest.mark.parametrize(
    ("title", "lines"),
    [
        ("theta+lora@seed=1", ["theta+lora@seed=1"]),
        ("theta+tape2+lora@tape.layers=[0,5,10,15,20,25]", ["theta+tape2+lora", "@tape.layers=[0,5,10,", "15,20,25]"]),
        ("rope, half decay, jumps\nmean 4.00", ["rope, half decay,", "jumps", "mean 4.00"]),
        ("a-name-without-any-place-to-break", ["a-name-without-any-place-to-break"]),
    ],
)
def test_titles_of_panels_are_broken_where_they_would_overlap(title, lines):
    assert fit_lines(title, 21).splitlines() == lines


def test_bands_reach_from_the_lowest_to_the_highest_seed():
    seeds = {1.0: (5.0, 1.0, 3.0), 2.0: (2.0, 8.0, 5.0), 4.0: (7.0,)}
    axes, style = Mock(), series_styles({"rope": "rope"})["rope"]
    draw_line(axes, spread_line("rope", style, [(x, Spread(values=values)) for x, values in seeds.items()]), 0)
    assert axes.plot.call_args.args == ([1.0, 2.0, 4.0], [3.0, 5.0, 7.0])
    assert axes.fill_between.call_args.args == ([1.0, 2.0, 4.0], [1.0, 2.0, 7.0], [5.0, 8.0, 7.0])
    alone = Mock()
    draw_line(alone, spread_line("rope", style, [(1.0, Spread(values=(5.0,)))]), 0)
    alone.fill_between.assert_not_called()


def make_curve(x, y, x_label="tokens"):
    return Curve(title="t", x_label=x_label, y_label="loss", x=x, y=y)


def test_curves_of_other_places_are_joined_in_order():
    curves = [{"x": [4, 8], "y": [1.0, 2.0]}, {"x": [2, 4], "y": [5.0, 3.0]}, {"x": [8, 1], "y": [None, 7.0]}]
    points = [(x, spread.values) for x, spread in curve_spreads([make_curve(**curve) for curve in curves])]
    assert points == [(1, (7.0,)), (2, (5.0,)), (4, (1.0, 3.0)), (8, (2.0,))]

    def change(evaluation, curve):
        evaluation["curves"] = [{"title": "loss by length", "x_label": "letters", "y_label": "loss", **curve}]

    plot = plot_curve(summary_of({"a": curves}, change), "loss by length")
    assert plot.alt.endswith("mean over seeds: a 7.000 at 1, 2.000 at 8.")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([0.1, 0.5, 0.9], [0.1, 0.5, 0.9]),
        ([0.5, 0.5, 0.5], [0.4, 0.5, 0.6]),
        ([0.5, 0.1, 0.52], [0.46, 0.1, 0.56]),
        # two blocks that meet become one
        ([0.0, 0.0, 0.12, 0.12], [-0.09, 0.01, 0.11, 0.21]),
        ([], []),
    ],
)
def test_labels_are_moved_apart_as_little_as_possible(wanted, found):
    assert spread_out(wanted, 0.1) == pytest.approx(found)


def test_names_at_the_ends_of_lines_do_not_overlap():
    names = [f"encoding {index}" for index in range(9)]
    styles = series_styles(dict.fromkeys(names))
    lines = [Line(label=name, style=styles[name], x=[1, 2], y=[1, 1 + index / 100]) for index, name in enumerate(names)]
    with line_figure([LinePanel(x_label="x", y_label="y", lines=lines)]) as figure:
        figure.draw_without_rendering()
        (axes,) = figure.axes
        # an annotation's own extent includes its line
        boxes = [Text.get_window_extent(text) for text in axes.texts]
        assert [text.get_text() for text in axes.texts] == names
        assert all(lower.y1 <= upper.y0 for lower, upper in itertools.pairwise(boxes))
        assert all(box.x0 > axes.get_window_extent().x1 for box in boxes)


def test_bins_are_even_on_a_logarithmic_axis():
    places = [64.0 * step for step in range(1, 129)]
    bins = log_bins(places, 7)
    assert [index for part in bins for index in part] == list(range(128))
    assert [len(part) for part in bins] == [1, 2, 4, 8, 16, 32, 65]
    curve = in_log_bins(make_curve(places, [float(step) for step in range(128)]))
    assert curve.x[0] == 64.0
    assert sum(len(part) for part in log_bins(places)) == 128
    assert curve.y == sorted(curve.y)
    holes = in_log_bins(make_curve(places, [None] * 64 + [3.0] * 64))
    assert math.isnan(holes.y[0])
    assert holes.y[-1] == 3.0
