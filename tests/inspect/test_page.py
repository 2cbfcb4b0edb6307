"""The page holds what was seen, rounded as it says, and needs nothing beside it."""

import base64
import json
import re
import zlib

import numpy as np
import pytest
import torch

from cases import build, draw_tokens
from equitape.inspect import certify, look_inside, measure_stability, write_page, write_pictures
from equitape.inspect.page import MISSING, Scale, linear_scale, maps_of, root_scale, signed_scale
from equitape.inspect.pictures import draw_maps


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
    seen = look_inside(tape, tokens, labels, max_cells=15)
    path = tmp_path_factory.mktemp("page") / "new" / "page.html"
    write_page(
        path,
        seen,
        title="A <model>",
        facts=[("torch", "2")],
        stability=measure_stability(tape, tokens, 1),
        certificate=certify(tape, 12),
    )
    text = path.read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    return path, text, data, seen


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
    _, _, data, seen = page
    maps = {entry["name"]: entry for entry in data["maps"]}
    assert set(maps) == {"attention", "attention-change", "products", "products-change", "distance", "mixing-mean"}
    entry = maps["attention"]
    for layer in range(4):
        levels = np.frombuffer(zlib.decompress(base64.b64decode(entry["data"][layer])), dtype=np.uint8)
        found = decode(entry["scales"][layer], levels.reshape(5, 15, 15))
        # the mean of heads comes first
        assert np.nanmax(np.abs(found[1:] - seen.attention[layer])) < 0.005
        assert np.nanmax(np.abs(found[0] - seen.attention[layer].mean(0))) < 0.005
        assert np.isnan(found[0]).sum() == 15 * 14 / 2
    assert data["labels"][4] == "w4</script>"
    assert data["cells"][-1] == [28, 29]
    assert (data["layers"], data["heads"], data["groups"]) == (4, 4, 2)


def test_states_that_grow_leave_the_first_layer_readable(tmp_path):
    """Under one scale for all layers, products of the start would be one level, and one colour."""
    model = build("tape", num_hidden_layers=4)
    with torch.no_grad():
        for block in model.model.layers[:-1]:
            block.self_attn.encoding.mix_out.mul_(20)
    seen = look_inside(model, draw_tokens(1, 12))
    assert np.abs(seen.products[3]).max() > 1000 * np.abs(seen.products[0]).max()
    maps = {entry["name"]: entry for entry in maps_of(seen)}
    for name, expected in (("products", seen.products), ("products-change", seen.products - seen.products[:1])):
        assert "Each layer has its own scale." in maps[name]["caption"]
        for layer in range(4):
            levels = np.frombuffer(zlib.decompress(base64.b64decode(maps[name]["data"][layer])), dtype=np.uint8)
            found = decode(maps[name]["scales"][layer], levels.reshape(12, 12))
            assert np.abs(found - expected[layer]).max() <= 0.01 * np.abs(expected[layer]).max()
    panels = draw_maps(seen, seen.products, "", "linear", own_scales=True).axes
    pictures = [axes.images[0] for axes in panels if axes.images]
    assert [picture.get_clim()[1] for picture in pictures] == [pytest.approx(layer.max()) for layer in seen.products]
    # where layers are alike, one scale compares them
    alike = {entry["name"]: entry for entry in maps_of(look_inside(build("rope"), draw_tokens(1, 12)))}["products"]
    assert alike["scales"] == [alike["scales"][0]] * 3
    assert "own scale" not in alike["caption"]


def test_page_tells_what_it_left_out_and_the_tables(page):
    text = page[1]
    assert "30 tokens as 15 x 15 cells of 2 tokens" in text
    assert "rounded to 8 bits" in text
    for part in ("not equivariant", "ids from 1,000,000", "3 [BOS] in front", "rotation", "largest error", ">pass<"):
        assert part in text


def test_pictures(tape, tmp_path):
    seen = look_inside(tape, draw_tokens(1, 12))
    names = {path.name for path in write_pictures(seen, tmp_path)}
    assert names == {
        "attention.png", "attention-change.png", "state-products.png", "effective-distance.png", "layers.png", "tokens.png",
    }  # fmt: skip
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("case", ["alibi", "rope", "tensor_tape", "tape-options"])
def test_encodings_with_less_to_show(case, tmp_path):
    model = build(case, dtype=torch.float32)
    seen = look_inside(model, draw_tokens(1, 10))
    write_page(tmp_path / "page.html", seen, title=case)
    written = {path.name for path in write_pictures(seen, tmp_path)}
    assert "attention.png" in written
    assert ("state-products.png" in written) == (case != "alibi")
    assert ("attention-change.png" in written) == ("tape" in case)
    assert ("does not update a state" in (tmp_path / "page.html").read_text()) == ("tape" not in case)
