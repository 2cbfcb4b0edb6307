"""Reports say what the runs say, no more and no less, and need no other files."""

import copy
import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from made_up import make_results, make_run

from equitape import available_encodings
from equitape.report import summary as summaries
from equitape.report import write_report
from equitape.report.comparison import findings, task_idea
from equitape.report.comparison_plots import loss_points, plot_curve, styles_of
from equitape.report.comparison_tables import (
    claims_table,
    durations,
    headline_table,
    paired_table,
    runs_table,
    spread_cell,
)
from equitape.report.numbers import duration, number, quantity, with_unit
from equitape.report.style import ENCODINGS, series_styles
from equitape.report.summary import Spread, mean_grid, t_95
from equitape.runs.results import Comparison


def summarise(results):
    return summaries.summarise(Comparison.from_dict(results))


@pytest.fixture(scope="module")
def results():
    return make_results()


@pytest.fixture(scope="module")
def folder(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "results.json").write_text(json.dumps(results))
    before = copy.deepcopy(results)
    write_report(json.loads(json.dumps(results)), folder)
    assert results == before
    assert json.loads((folder / "results.json").read_text()) == results
    return folder


class Page(HTMLParser):
    """Everything a page could fetch, its text, and its ids."""

    def __init__(self, text):
        super().__init__()
        self.fetches, self.ids, self.tags, self.words = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.fetches.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_data(self, data):
        self.words.append(data)


def paired_cells(runs):
    summary = summarise({**make_results(), "runs": runs})
    table = paired_table(summary, ["exact_match"])
    return None if table is None else {row[0].text: row[1] for row in table.rows}


def run_with(label, seed, match, status="done"):
    run = make_run(label, seed, 1.0, status)
    if status == "done":
        run["evaluation"]["metrics"]["exact_match"] = match
    return run


def test_differences_are_taken_seed_by_seed():
    runs = [run_with("rope", seed, match) for seed, match in enumerate([10.0, 50.0, 90.0])]
    # always better by little, though the means of all runs say otherwise: its best seed is missing
    runs += [run_with("tape", seed, match) for seed, match in enumerate([11.0, 53.0])]
    runs += [run_with("tape", 2, None, status="missing")]
    cell = paired_cells(runs)["tape"]
    assert cell.text == "+2.0"
    # t with one degree of freedom, times the deviation sqrt 2 over sqrt 2
    assert cell.detail == "95 %: -10.7 … +14.7, n = 2"
    assert cell.kind == ""
    clear = [run_with("tape", seed, match) for seed, match in enumerate([12.0, 52.2, 91.8])]
    cell = paired_cells([*runs[:3], *clear])["tape"]
    assert (cell.text, cell.detail, cell.kind) == ("+2.00", "95 %: +1.50 … +2.50, n = 3", "clear")


def test_differences_have_the_digits_they_need():
    """However large what they are differences of; none of them is minus nothing."""
    rope = [run_with("rope", seed, 25_000.0) for seed in range(2)]

    def cell(*values):
        return paired_cells([*rope, *(run_with("tape", seed, value) for seed, value in enumerate(values))])["tape"]

    assert cell(25_000.0011, 25_000.0033).text == "+0.0022"
    assert cell(24_000.0, 24_100.0).text == "-950"
    assert cell(25_000.0, 25_000.0).text == "0.00"
    assert cell(24_999.9999, 25_000.0001).text == "0.00000"
    assert cell(math.inf, 25_001.0).detail == "95 %: -infinite … +infinite, n = 2"


def test_differences_of_checkpoints_began_with_other_weights():
    runs = [run_with(label, seed, 10.0) for label in ("one", "other") for seed in range(2)]
    results = {**make_results(), "runs": runs}

    def note(encodings):
        recipe = {**results["recipe"], "encodings": encodings}
        return paired_table(summarise({**results, "recipe": recipe}), ["exact_match"]).notes[0]

    assert "started from the same shared weights" in note(["one", {"kind": "other"}])
    assert "started from the same shared weights" not in note(["one", {"kind": "other", "start": "folder"}])


def test_one_seed_has_no_table_of_differences():
    assert paired_cells([run_with("rope", 0, 10.0), run_with("tape", 0, 11.0)]) is None
    assert paired_cells([run_with("rope", seed, 10.0) for seed in range(3)]) is None
    # seeds that only one of the two has are not compared
    apart = [run_with("rope", seed, 10.0) for seed in (0, 1)] + [run_with("tape", seed, 11.0) for seed in (2, 3)]
    assert paired_cells(apart) is None


def test_page_fetches_nothing(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert all(target.startswith(("#", "data:")) for target in page.fetches)
    assert not re.search(r"@import|url\((?!#|\"?data:)", text)
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids)), "two pictures share an id and would show each other's parts"
    # whatever a picture refers to is in the page
    assert {target[1:] for target in page.fetches if target.startswith("#")} <= set(page.ids)
    assert "prefers-color-scheme: dark" in text


def test_pictures_have_texts_and_take_the_colour_of_the_page(folder, results):
    text = (folder / "report.html").read_text()
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    labels = re.findall(r'role="img" aria-label="([^"]*)"', text)
    assert len(pictures) == len(labels) == 3
    assert all(len(label) > 60 for label in labels)
    for picture in pictures:
        ElementTree.fromstring(picture.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1)
                               if "xmlns:xlink" not in picture else picture)  # fmt: skip
        assert "currentColor" in picture
    for run in results["runs"]:
        assert run["label"] in "".join(labels)


def test_markdown_shows_the_same_and_its_pictures_exist(folder):
    text = (folder / "report.md").read_text()
    pictures = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    assert len(pictures) == 3
    for _, target in pictures:
        assert (folder / target).read_bytes().startswith(b"\x89PNG")
    # every row of a table has as many cells as its head
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_nothing_is_hidden(folder, results, name):
    text = (folder / name).read_text()
    shown = "".join(Page(text).words) if name.endswith("html") else text.replace("\\|", "|")
    for run in results["runs"]:
        if run["status"] != "done":
            assert run["note"] in shown
    assert "1 of 3 runs failed" in shown
    assert "1 of 3 runs missing" in shown
    for value in results["environment"].values():
        assert value in shown
    assert "Up to 3 runs shared the machine" in shown
    for part in (
        "2501.00712",
        "41.42",
        "Claims were not measured here",
        "not run here",
        "trained_digits: 20",
        "Sums & more.",
        "unknown",
    ):
        assert part in shown
    for heading in ("In distribution", "In and out of distribution together", "Published numbers and ours"):
        assert heading in shown


def test_figures_over_seeds_agree_with_numpy(results):
    summary = summarise(results)
    for group in summary.groups:
        values = [
            run["evaluation"]["metrics"]["exact_match_outside"]
            for run in results["runs"]
            if run["label"] == group.label and run["status"] == "done"
        ]
        spread = group.metric("exact_match_outside")
        assert spread.mean == pytest.approx(np.mean(values))
        assert spread.deviation == pytest.approx(np.std(values, ddof=1))
        assert (spread.low, spread.high, spread.count) == (min(values), max(values), len(values))
    maps = [run["evaluation"]["heat_maps"][0]["values"] for run in results["runs"] if run["label"] == "tape"]
    assert np.allclose(mean_grid(maps), np.mean(maps, axis=0))
    holes = copy.deepcopy(maps)
    holes[0][1][2] = None
    assert mean_grid(holes)[1][2] == pytest.approx((maps[1][1][2] + maps[2][1][2]) / 2)
    assert math.isnan(mean_grid([[[None]], [[None]]])[0][0])


def test_metrics_in_and_out_of_distribution_stand_apart(results, folder):
    text = (folder / "report.md").read_text()
    parts = {part.partition("\n")[0]: part for part in text.split("## ")}
    inside, both = parts["In distribution"], parts["In and out of distribution together"]
    assert "exact match inside, % ↑" in inside
    assert "exact match, %" not in inside
    assert "outside" not in inside
    assert "exact match, % ↑" in both
    assert "inside" not in both.partition("\n\n")[2].splitlines()[0]


def test_the_headline_of_a_length_task_is_out_of_distribution(results, folder):
    """The mean over trained and untrained lengths would crown the one that learnt the trained ones best."""
    summary = summarise(results)
    assert results["task"]["headline"] == "exact_match"
    assert summary.headline == "exact_match_outside"
    assert summary.higher_is_better("exact_match_outside") is True
    first = (folder / "report.md").read_text().split("## Quality and cost")[1]
    assert first.strip().startswith("| encoding | exact match outside, % ↑ |")
    grid = copy.deepcopy(results)
    grid["task"]["headline"] = "exact_match_grid"
    assert summarise(grid).headline == "exact_match_outside"
    # language modelling is first of all about the trained length
    text = make_run("rope", 0, 1.0)
    text["evaluation"]["metrics"] = {"bits_per_byte_1x": 1.0, "bits_per_byte_outside_2x": 1.1}
    task = {**results["task"], "headline": "bits_per_byte_1x", "higher_is_better": False}
    assert summarise({**results, "runs": [text], "task": task}).headline == "bits_per_byte_1x"


def test_evaluated_lengths_follow_the_options(results):
    text = copy.deepcopy(results)
    text["task"]["idea"] = "language modelling, scored at 1 to 8 times the trained length"
    text["recipe"]["task"] = {"name": "text", "factors": [1, 4, 2]}
    assert task_idea(Comparison.from_dict(text)) == "language modelling, scored at 1, 2 and 4 times the trained length"
    text["recipe"]["task"]["factors"] = [1]
    assert task_idea(Comparison.from_dict(text)).endswith(", scored at 1 times the trained length")
    assert task_idea(Comparison.from_dict(results)) == results["task"]["idea"]


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (30, 2.0423), (31, 2.0395), (120, 1.9799)]
)
def test_quantiles_of_student(degrees, quantile):
    assert t_95(degrees) == pytest.approx(quantile, abs=6e-4)


def summary_of(values, higher=True, statuses=()):
    """Of encodings a, b, ... with these values over seeds."""
    runs = []
    for label, scores in values.items():
        for seed, score in enumerate(scores):
            run = make_run(label, seed, 1.0)
            run["evaluation"]["metrics"] = {"points": score}
            runs.append(run)
        runs += [make_run(label, 99, 1.0, "failed", "no") for name in statuses if name == label]
    results = {**make_results(), "runs": runs}
    results["task"] = {**results["task"], "headline": "points", "higher_is_better": higher}
    return summarise(results)


def best_of(values, **rest):
    """The label marked best."""
    return summary_of(values, **rest).best("points")


def test_best_is_marked_only_beyond_the_spread():
    assert best_of({"a": [10, 11, 12], "b": [1, 2, 3]}) == "a"
    assert best_of({"a": [10, 11, 12], "b": [1, 2, 3]}, higher=False) == "b"
    # the means differ by 1, the deviations add to 2
    assert best_of({"a": [10, 11, 12], "b": [9, 10, 11]}) is None
    # a third that is close takes the mark away
    assert best_of({"a": [10, 11, 12], "b": [1, 2, 3], "c": [10, 11, 11]}) is None
    # one seed has no spread, and a run that failed may have been the bad one
    assert best_of({"a": [11], "b": [1]}) is None
    assert best_of({"a": [10, 11, 12], "b": [1, 2, 3]}, statuses=["a"]) is None
    assert best_of({"a": [10, 11, 12], "b": [1, 2, 3]}, statuses=["b"]) == "a"
    assert best_of({"a": [1, 1, 1], "b": [1, 1, 1]}) is None
    assert best_of({"a": [10, 11, 12]}) is None
    assert best_of({"a": [5, 6, math.inf], "b": [1, 2, 3]}, higher=False) is None
    # infinity as a file holds it
    assert best_of({"a": [1, 2, None], "b": [11, 12, 13]}, higher=False) is None
    assert best_of({"a": [1, 2, 3], "b": [11, 12, None]}, higher=False) == "a"


@pytest.mark.parametrize(
    ("values", "statuses", "printed"),
    [
        ({"a": [10, 11, 12], "b": [1, 2, 3]}, [], "a leads with points 11.00, by more than the spread over seeds."),
        ({"a": [10, 11, 12], "b": [9, 10, 11]}, [], "but within the spread over seeds; none is marked best"),
        ({"a": [11], "b": [1, 2, 3]}, [], "from a single seed. Its spread is unknown, so none is marked best"),
        (
            {"a": [10, 11, 12], "b": [1, 2, 3], "c": [2], "d": [3]},
            [],
            "11.00, by more than the spread over seeds. The spread of the 2 with one seed is unknown, so none is marked best",
        ),
        ({"a": [10, 11, 12], "b": [2]}, [], "11.00. The spread of the 1 with one seed is unknown"),
        ({"a": [10, 11, 12], "b": [1, 2, 3]}, ["a"], "seeds. Not all of its runs have a score"),
        ({"a": [10, 11, None], "b": [1, 2, 3]}, [], "seeds. Not all of its runs have a score"),
        ({"a": [10, 11, 12]}, [], "a comes first with points 11.00."),
        ({"a": [0], "b": [0]}, [], "All 2 encodings have points 0.00, so the result does not distinguish them."),
        (
            {"a": [4, 6], "b": [1], "c": [5]},
            [],
            "None is marked best, since 2 share first place with points 5.000: a; c.",
        ),
        (
            {"a, x": [5], "b": [1], "c": [5]},
            [],
            "None is marked best, since 2 share first place with points 5.000: a, x; c.",
        ),
    ],
)
def test_the_first_sentence_says_why_nothing_is_marked(values, statuses, printed):
    assert printed in findings(summary_of(values, statuses=statuses))[0]


def test_scores_that_are_not_finite_are_named():
    assert "a, seed 2: points is not finite; means leave it out." in findings(summary_of({"a": [1, 2, None], "b": [3]}))


def test_an_undeclared_direction_is_not_guessed(results):
    summary = summarise(results)
    assert summary.higher_is_better("exact_match") is True
    assert summary.higher_is_better("perplexity_outside_2x") is False
    assert summary.higher_is_better("digits") is None
    assert summary.best("digits") is None


@pytest.mark.parametrize("seeds", [0, 1])
def test_reports_of_few_runs(tmp_path, seeds):
    results = make_results()
    results["runs"] = [make_run("rope", seed, 1.0) for seed in range(seeds)] + [
        make_run("tape", 0, 1.0, "missing", "Not run yet.")
    ]
    results["claims"], results["claims_source"] = {}, None
    write_report(results, tmp_path / "new" / "folder")
    text = (tmp_path / "new" / "folder" / "report.md").read_text()
    assert ("n = 1" in text) == (seeds == 1)
    assert "★ (" not in text
    assert ("No run is finished" in text) == (seeds == 0)
    assert "Published" not in text


def test_no_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="have no runs"):
        write_report({**make_results(), "runs": []}, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [10, 12, 24, 55])
def test_lines_differ_without_colour(count):
    """By marker and dashes together; a few lines by the marker alone."""
    results = make_results()
    results["runs"] = [make_run(f"encoding {index}", 0, 1.0, "missing") for index in range(count)]
    summary = summarise(results)
    styles = list(styles_of(summary).values())
    assert len({(style.marker, str(style.dashes)) for style in styles}) == count
    assert len({style.marker for style in styles}) == min(count, 11)
    # lines that share a marker differ in dashes and in colour
    assert len({(style.marker, style.colour) for style in styles}) == count


def test_every_encoding_looks_the_same_in_all_reports():
    """Whatever else is in a report; variants share the colour's hue and differ in marker and dashes."""
    alone = series_styles({"tape": "tape"})["tape"]
    among = series_styles({"rope": "rope", "tape, no carry": "tape", "tape": "tape", "mine": None})
    assert (among["tape"].colour, among["tape"].marker) == (alone.colour, alone.marker) == ENCODINGS["tape"]
    variant = among["tape, no carry"]
    assert variant.colour != alone.colour
    assert (variant.marker, variant.dashes) != (alone.marker, alone.dashes)
    assert len(set(ENCODINGS.values())) == len({colour for colour, _ in ENCODINGS.values()}) == len(ENCODINGS)
    for kind in available_encodings():
        both = series_styles({kind: kind, "variant": kind})
        assert (both[kind].colour, both[kind].marker) == ENCODINGS[kind]
        assert both["variant"].marker != both[kind].marker
    # a model without a known encoding may still bear the name of one
    assert series_styles({"rope": None})["rope"].colour == ENCODINGS["rope"][0]


def test_long_logs_are_averaged_not_sampled(results):
    group = summarise(results).groups[3]
    points = loss_points(group)
    logs = np.array([[loss for _, loss in run.log] for run in group.runs])
    assert len(points) == 200
    assert np.allclose([spread.mean for _, spread in points], logs.mean(0).reshape(200, 2).mean(1))
    assert [step for step, _ in points] == [step for step, _ in group.runs[0].log][1::2]


def test_logs_of_failed_runs_are_drawn_as_far_as_they_go(results):
    group = summarise({**results, "runs": [make_run("rope", 0, 1.0, "nan", "broke")]}).groups[0]
    assert [step for step, _ in loss_points(group)][-1] == 200


def test_same_results_give_the_same_pictures(results):
    title = "perplexity against length"
    assert plot_curve(summarise(results), title) == plot_curve(summarise(results), title)


def test_where_training_ended(results):
    summary = summarise(results)
    assert summary.trained_up_to("digits of the first operand") == 20
    assert summary.trained_up_to("tokens read at once") == 1024
    assert summary.trained_up_to("blanks") is None


def claims_of(claims, headline="exact_match", finished=True):
    """The table of published numbers as text: (columns, {encoding: cells}, notes)."""
    results = make_results()
    results["runs"] = [make_run(label, 0, 1.0, "done" if finished else "missing") for label in ("rope", "tape")]
    results |= {"claims": claims, "task": {**results["task"], "headline": headline}}
    table = claims_table(summarise(results))
    assert all(len(row) == len(table.columns) for row in table.rows)
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    return table.columns[1:], rows, " ".join(table.notes)


def test_claims_of_metrics_that_the_task_does_not_compute():
    """They have no empty column of ours; the headline is next to them under its own name."""
    github = {"rope": {"perplexity_github": 57.2}, "tape": {"perplexity_github": 52.2}}
    columns, rows, notes = claims_of(github)
    assert columns == ["perplexity github, claimed ↓", "exact match outside, ours, a different metric ↑"]
    assert [cells[0] for cells in rows.values()] == ["57.20", "52.20"]
    assert all("-" not in cells for cells in rows.values())
    assert "Not measured here: perplexity github. Our exact match outside is a different metric" in notes
    # next to a claim that can be compared, and one of an encoding that was not run
    mixed = {"rope": {"exact_match": 26.12, "perplexity_github": 57.2}, "fire": {"perplexity_github": 55.0}}
    columns, rows, notes = claims_of(mixed)
    assert columns == ["exact match, ours", "exact match, claimed", "perplexity github, claimed ↓"]
    assert rows["rope"][1:] == ["26.12", "57.20"]
    assert rows["tape"][1:] == ["-", "-"]
    assert rows["fire"] == ["-", "-", "55.00"]
    assert "Not measured here" in notes
    assert "a different metric" not in notes


def test_claims_before_anything_is_known():
    columns, rows, notes = claims_of({"rope": {"exact_match": 26.12}}, finished=False)
    assert columns == ["exact match, ours", "exact match, claimed"]
    assert rows == {"rope": ["-", "26.12"], "tape": ["-", "-"]}
    assert "Not measured" not in notes


def test_durations_of_a_column_share_a_unit():
    def texts(*column):
        return [cell.text for cell in durations(column)]

    assert texts(120.0, 111.5, None) == ["120.0 s", "111.5 s", "-"]
    assert texts(130.0, 7300.0) == ["2.2 min", "121.7 min"]
    assert texts(7200.0, 36000.0) == ["2.0 h", "10.0 h"]
    assert texts(30.0, 36000.0) == ["30.0 s", "36,000.0 s"]
    assert texts(None, None) == ["-", "-"]
    assert [duration(seconds) for seconds in (119.0, 120.0, 7200.0)] == ["119.0 s", "2.0 min", "2.0 h"]

    results = make_results()
    results["runs"] = [make_run("rope", 0, 1.0), make_run("tape", 0, 1.0), make_run("fire", 0, 1.0, "missing")]
    for run, seconds in zip(results["runs"], (121.0, 111.5, None), strict=True):
        run["seconds"] = seconds
    summary = summarise(results)
    for table, column in ((headline_table(summary), "training time"), (runs_table(summary), "time")):
        place = table.columns.index(column)
        assert [row[place].text for row in table.rows] == ["121.0 s", "111.5 s", "-"]


def test_quantities():
    assert [quantity(count) for count in (999, 4_812, 280_032, 4_816_032, 155_330_000, 2.5e9)] == [
        "999", "4.812 k", "280.0 k", "4.816 M", "155.3 M", "2.500 G",
    ]  # fmt: skip


def test_units_stand_with_their_metrics(folder, tmp_path):
    shown = (folder / "report.md").read_text()
    assert "exact match inside, % ↑" in shown
    assert "Heat maps of exact match in per cent" in shown
    text = {**make_run("rope", 0, 1.0), "evaluation": {"metrics": {"perplexity": 3.0}, "heat_maps": [], "curves": []}}
    results = make_results()
    write_report({**results, "runs": [text], "task": {**results["task"], "headline": "perplexity"}}, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| perplexity ↓ |" in text
    assert "%" not in text


def test_a_share_that_is_not_zero_is_not_shown_as_zero():
    assert [with_unit(value, "%") for value in (0.0, 0, 0.0034519, 0.0049, 0.005, 0.0151, 12.345, None)] == [
        "0.00", "0.00", "0.0035", "0.0049", "0.01", "0.02", "12.35", "-",
    ]  # fmt: skip
    cell = spread_cell(Spread(values=(0.0, 0.0034519, 0.0)), "%")
    assert (cell.text, cell.detail) == ("0.0012 ± 0.0020", "0.0000 … 0.0035, n = 3")
    assert spread_cell(Spread(values=(0.0, 0.0, 0.0)), "%").text == "0.00 ± 0.00"


def test_numbers():
    assert number(26.324) == "26.32"
    assert number(0.0123456) == "0.01235"
    assert number(1234567.0) == "1,234,567"
    assert number(math.inf) == "infinite"
    assert number(4.3e-10) == "4.3e-10"
    assert number(0.0) == "0.00"
    cell = spread_cell(Spread(values=(25.0, 26.0, 27.5)))
    assert cell.text == "26.17 ± 1.26"
    assert cell.detail == "25.00 … 27.50, n = 3"
