"""The page holds what was measured, rounded as it says, and needs no other file."""

import base64
import json
import re
import zlib

import numpy as np
import pytest
import torch

from cases import build, draw_tokens
from equitape.inspect import inspect_model, measure_stability
from equitape.report.inspection import (
    MISSING,
    Scale,
    linear_scale,
    maps_of,
    root_scale,
    signed_scale,
    strip_values,
    write_page,
)
from equitape.report.inspection_plots import inspection_plots, plot_layers, plot_strips
from equitape.report.pages import write_plots


def decode(scale, levels):
    """What the page's script makes of a level, written once more."""
    share = levels.astype(np.float64) / 254
    if scale["kind"] == "linear":
        value = scale["low"] + share * (scale["high"] - scale["low"])
    elif scale["kind"] == "root":
        value = share**2 * scale["high"]
    else:
        value = np.sign(2 * share - 1) * (2 * share - 1) ** 2 * scale["high"]
    return np.where(levels == MISSING, np.nan, value)


@pytest.mark.parametrize("make", [linear_scale, root_scale, signed_scale])
def test_rounding_is_at_most_half_a_level(make):
    values = np.random.default_rng(0).normal(size=(50, 50)).astype(np.float32)
    if make is root_scale:
        values = values**2
    values[3, 4] = np.nan
    scale = make(values)
    levels = scale.encode(values)
    assert levels[3, 4] == MISSING
    assert (levels == MISSING).sum() == 1
    found = decode(vars(scale), levels)
    shares = {"linear": lambda v: v, "root": np.sqrt, "signed": lambda v: np.sign(v) * np.sqrt(np.abs(v))}[scale.kind]
    span = shares(np.float64(scale.high)) - shares(np.float64(scale.low))
    assert np.nanmax(np.abs(shares(values) - shares(found))) <= span / 254 / 2 * (1 + 1e-5)


def test_zero_is_exact_on_signed_maps():
    scale = Scale(kind="signed", low=-0.7, high=0.7)
    assert decode(vars(scale), scale.encode(np.zeros(3)))[0] == 0


@pytest.fixture(scope="module")
def tape():
    return build("tape", num_hidden_layers=4)


@pytest.fixture(scope="module")
def page(tape, tmp_path_factory):
    tokens = draw_tokens(1, 30)
    labels = [f"w{index}</script>" if index == 4 else f" word{index}" for index in range(30)]
    inspection = inspect_model(tape, tokens, labels, max_cells=15)
    path = tmp_path_factory.mktemp("page") / "new" / "page.html"
    write_page(
        path,
        inspection,
        title="A <model>",
        facts=[("torch", "2")],
        stability=measure_stability(tape, tokens, 1),
    )
    text = path.read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    return path, text, data, inspection


def test_page_fetches_nothing(page):
    text = page[1]
    assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=\"(?!data:)", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|import\(", text)
    # the one address is the name of a markup language
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert text.count("</script>") == 2
    assert "A &lt;model&gt;" in text
    assert "prefers-color-scheme: dark" in text


def test_page_holds_the_maps(page):
    _, _, data, inspection = page
    maps = {entry["name"]: entry for entry in data["maps"]}
    assert set(maps) == {"attention", "attention-change", "products", "products-change", "distance", "mixing-mean"}
    entry = maps["attention"]
    for layer in range(4):
        levels = np.frombuffer(zlib.decompress(base64.b64decode(entry["data"][layer])), dtype=np.uint8)
        found = decode(entry["scales"][layer], levels.reshape(5, 15, 15))
        # the mean of heads comes first
        assert np.nanmax(np.abs(found[1:] - inspection.attention[layer])) < 0.005
        assert np.nanmax(np.abs(found[0] - inspection.attention[layer].mean(0))) < 0.005
        assert np.isnan(found[0]).sum() == 15 * 14 / 2
    assert data["labels"][4] == "w4</script>"
    assert data["cells"][-1] == [28, 29]
    assert (data["layers"], data["heads"], data["groups"]) == (4, 4, 2)


@pytest.mark.usefixtures("no_drawing")
def test_states_that_grow_leave_the_first_layer_readable(tmp_path):
    """Under one scale for all layers, products of the start would be one level, and one colour."""
    model = build("tape", num_hidden_layers=4)
    with torch.no_grad():
        for block in model.model.layers[:-1]:
            block.self_attn.encoding.mix_out.mul_(60)
    inspection = inspect_model(model, draw_tokens(1, 12))
    assert np.abs(inspection.products[3]).max() > 1000 * np.abs(inspection.products[0]).max()
    maps = {entry["name"]: entry for entry in maps_of(inspection)}
    for name, expected in (
        ("products", inspection.products),
        ("products-change", inspection.products - inspection.products[:1]),
    ):
        assert maps[name]["shared"]["high"] == pytest.approx(
            expected.max() if name == "products" else np.abs(expected).max()
        )
        for layer in range(4):
            levels = np.frombuffer(zlib.decompress(base64.b64decode(maps[name]["data"][layer])), dtype=np.uint8)
            found = decode(maps[name]["scales"][layer], levels.reshape(12, 12))
            assert np.abs(found - expected[layer]).max() <= 0.01 * np.abs(expected[layer]).max()
    titles = {plot.name: plot.title for plot in inspection_plots(inspection)}
    assert titles["state-products"] == "Products of positional states, one scale per layer"
    # where layers are alike, one scale compares them
    alike = {plot.name: plot.title for plot in inspection_plots(inspect_model(build("rope"), draw_tokens(1, 12)))}
    assert alike["state-products"] == "Products of positional states"


def test_rounding_errors_stay_white():
    """On a layer's own scale they would fill the range of colours."""
    inspection = inspect_model(build("tape", num_hidden_layers=3, dtype=torch.float32), draw_tokens(1, 12))
    entry = {entry["name"]: entry for entry in maps_of(inspection)}["distance"]
    levels = np.frombuffer(zlib.decompress(base64.b64decode(entry["data"][0])), dtype=np.uint8)
    assert 0 < np.nanmax(np.abs(inspection.distances[0] - inspection.true_distances())) < 1e-2
    known = levels[levels != MISSING].astype(int)
    assert entry["scales"][0]["high"] >= 1e-3 * entry["shared"]["high"]
    assert np.abs(known - 127).max() < 127


def test_every_map_says_what_moves_it(page):
    data = page[2]
    follows = {entry["name"]: entry["follows"] for entry in (*data["maps"], *data["strips"])}
    for name in ("attention", "attention-change", "distance", "norms", "displacement"):
        assert "head slider" in follows[name].replace("sliders", "slider")
        assert "does not" not in follows[name]
    for name in ("products", "products-change", "mixing-mean", "mixing-strength", "mixing-own"):
        assert "the head slider does not change it" in follows[name]


def test_page_shows_the_text(page):
    text = page[1]
    assert '<span data-token="4">w4&lt;/script&gt;</span>' in text
    assert text.count("data-token=") == 30 + 1, "one per token, and one in the script"


def test_stability_has_verdicts_and_colours(page):
    text = page[1]
    assert re.search(r'<td class="size-0">unchanged</td>', text)
    assert re.search(r'<td class="size-[123]">(slight change|changed)</td>', text)
    assert (
        "tape: attention is unchanged by ids from 3, ids from 1,000, ids from 1,000,000; changed by 3 [BOS] in front"
        in text
    )


def test_diverging_maps_are_white_at_zero(page):
    data = page[2]
    changes = {entry["name"]: entry["colours"] for entry in data["maps"]}
    table = np.frombuffer(base64.b64decode(data["colours"][changes["attention-change"]]), dtype=np.uint8).reshape(-1, 3)
    assert table[127].min() > 240
    assert changes["products-change"] == changes["distance"] == changes["attention-change"] != changes["attention"]


def test_page_lists_what_it_left_out_and_the_tables(page):
    text = page[1]
    assert "30 tokens as 15 x 15 cells of 2 tokens" in text
    assert "rounded to 8 bits" in text
    for part in ("not equivariant", "ids from 1,000,000", "3 [BOS] in front"):
        assert part in text


def test_pictures(tmp_path):
    inspection = inspect_model(build("tape", num_hidden_layers=2), draw_tokens(1, 6))
    names = set(write_plots(inspection_plots(inspection), tmp_path))
    assert names == {
        "attention.png", "attention-change.png", "state-products.png", "effective-distance.png", "layers.png", "tokens.png",
    }  # fmt: skip
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error")
def test_layers_with_an_encoding_of_their_own(tmp_path):
    """Their maps of states are empty, and changes are counted from the first layer that has a state."""
    window = {"sliding_window": 6, "sliding_layers": [0, 2], "local_encoding": "nope", "num_hidden_layers": 5}
    inspection = inspect_model(build("tape", **window), draw_tokens(1, 12))
    change = next(one for one in maps_of(inspection) if one["name"] == "products-change")
    levels = [np.frombuffer(zlib.decompress(base64.b64decode(layer)), dtype=np.uint8) for layer in change["data"]]
    assert [bool((layer == MISSING).all()) for layer in levels] == [True, False, True, False, False]
    write_page(tmp_path / "index.html", inspection, title="x")
    assert len(write_plots(inspection_plots(inspection), tmp_path)) > 4


@pytest.mark.usefixtures("no_drawing")
@pytest.mark.parametrize("case", ["alibi", "rope", "tensor_tape", "tape-options"])
def test_encodings_with_less_to_show(case, tmp_path):
    model = build(case, dtype=torch.float32)
    inspection = inspect_model(model, draw_tokens(1, 10))
    write_page(tmp_path / "page.html", inspection, title=case)
    written = set(write_plots(inspection_plots(inspection), tmp_path))
    assert "attention.png" in written
    assert ("state-products.png" in written) == (case != "alibi")
    assert ("attention-change.png" in written) == ("tape" in case)
    assert ("does not update a state" in (tmp_path / "page.html").read_text()) == ("tape" not in case)


@pytest.mark.parametrize("layers", [1, 2, 3, 12])
def test_plots_count_layers_in_whole_numbers(layers, monkeypatch):
    drawn = []
    for module in ("charts", "heat_maps"):
        monkeypatch.setattr(f"equitape.report.{module}.finish", lambda figure, *_: drawn.append(figure))
    inspection = inspect_model(build("tape", dtype=torch.float32, num_hidden_layers=layers), draw_tokens(1, 9))
    plot_layers(inspection)
    plot_strips(inspection)
    lines, strips = drawn
    axes = [each.yaxis for each in strips.axes if each.images] + [each.xaxis for each in lines.axes]
    assert len(axes) > len(lines.axes)
    for axis in axes:
        ticks = [tick for tick in axis.get_majorticklocs() if 0.5 <= tick <= layers + 0.5]
        assert ticks
        assert all(tick == round(tick) for tick in ticks)


def test_lines_show_zero_and_lie_inside_their_frames(monkeypatch):
    drawn = []
    monkeypatch.setattr("equitape.report.charts.finish", lambda figure, *_: drawn.append(figure))
    plot_layers(inspect_model(build("tape", dtype=torch.float32, num_hidden_layers=3), draw_tokens(1, 9)))
    for axes in drawn[0].axes:
        bottom, top = axes.get_ylim()
        values = [value for value in axes.lines[0].get_ydata() if value == value]
        room = 0.02 * (top - bottom)
        assert bottom + room < min([0.0, *values])
        assert max([0.0, *values]) < top - room


def test_rounding_of_normalised_states_has_no_colour():
    """Norms of 1 and of 0.99999994 are the same."""
    model = build("tape2", dtype=torch.float32, num_hidden_layers=3)
    inspection = inspect_model(model, draw_tokens(1, 12))
    assert np.unique(inspection.norms).size > 1
    assert np.unique(strip_values(inspection)["norms"][2]).tolist() == [1.0]
