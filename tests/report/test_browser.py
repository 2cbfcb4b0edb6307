"""The page in a real browser: it opens from disk, the sliders redraw, hovering names tokens, and dark is dark."""

import io
import shutil

import numpy as np
import pytest
import torch

from cases import build, draw_tokens
from equitape.inspect import inspect_model
from equitape.report.inspection import write_page

selenium = pytest.importorskip("selenium", reason="selenium is not installed; it comes with equitape[dev]")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium with its chromedriver here (Debian: chromium, chromium-driver)"
)
LAYERS, TOKENS = 4, 24


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    model = build("tape", num_hidden_layers=LAYERS)
    labels = [f" word{index}" for index in range(TOKENS)]
    path = tmp_path_factory.mktemp("browser") / "page.html"
    write_page(path, inspect_model(model, draw_tokens(1, TOKENS), labels), title="A model")
    return path


def open_browser(*flags):
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1200,1600",
        *flags,
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return Chrome(options=options, service=Service(DRIVER))


@pytest.fixture(scope="module")
def browser(page):
    browser = open_browser()
    browser.get(page.as_uri())
    wait_for(browser, f"{LAYERS - 1}/0")
    yield browser
    browser.quit()


def wait_for(browser, drawn):
    """Until the maps of "layer/head" are on the screen."""
    wait_until(browser, "return document.body.dataset.drawn", drawn)


def wait_until(browser, script, wanted):
    from selenium.webdriver.support.wait import WebDriverWait

    reached = WebDriverWait(browser, 30, poll_frequency=0.05)
    reached.until(lambda driver: driver.execute_script(script) == wanted, f"the page did not reach {wanted}")


def pixels(browser, name):
    """The drawn cells of a map, [rows, columns, 4]."""
    size, values = browser.execute_script(
        "const c = document.getElementById(arguments[0]);"
        "return [[c.height, c.width], Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data)];",
        f"map-{name}",
    )
    return np.array(values, dtype=np.uint8).reshape(*size, 4)


def move(browser, slider, value, drawn):
    """Set a slider as a person would: with the keys."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    element = browser.find_element(By.ID, slider)
    element.send_keys(Keys.HOME)
    start = int(element.get_attribute("min"))
    if value > start:
        element.send_keys(*[Keys.ARROW_RIGHT] * (value - start))
    wait_for(browser, drawn)


def screenshot(browser):
    image = pytest.importorskip("PIL.Image", reason="pillow reads screenshots")
    return np.array(image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")).astype(float)


def test_opens_from_disk_without_complaints(browser):
    assert browser.title == "A model"
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    attention = pixels(browser, "attention")
    assert attention.shape == (TOKENS, TOKENS, 4)
    # what no query can see is left clear, all else is drawn
    assert (attention[..., 3] == 255).sum() == TOKENS * (TOKENS + 1) / 2
    assert len(np.unique(attention[np.tril_indices(TOKENS)], axis=0)) > 20


def test_sliders_redraw(browser):
    move(browser, "layer", 1, "1/0")
    first = pixels(browser, "attention-change")
    # the first layer has an unmoved state: one colour
    assert len(np.unique(first[np.tril_indices(TOKENS)], axis=0)) == 1
    move(browser, "layer", LAYERS, f"{LAYERS}/0")
    last = pixels(browser, "attention-change")
    assert len(np.unique(last[np.tril_indices(TOKENS)], axis=0)) > 20
    mean = pixels(browser, "attention")
    move(browser, "head", 3, f"{LAYERS}/3")
    assert (pixels(browser, "attention") != mean).any()
    assert "3 of 4, kv head 2" in browser.find_element("id", "head-out").text
    move(browser, "head", 0, f"{LAYERS}/0")
    assert (pixels(browser, "attention") == mean).all()


def test_hovering_names_the_tokens(browser):
    from selenium.webdriver import ActionChains

    canvas, tip = browser.find_element("id", "map-attention"), browser.find_element("id", "tip")
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width = canvas.size["width"]
    # from the middle to the cell of row 20, column 5
    x, y = ((index + 0.5) * width / TOKENS - width / 2 for index in (5, 20))
    ActionChains(browser).move_to_element_with_offset(canvas, int(x), int(y)).perform()
    assert tip.is_displayed()
    assert "query 20 “ word20”" in tip.text
    assert "key 5 “ word5”" in tip.text
    marked = {
        name: [word.text for word in browser.find_elements("css selector", f"#text .{name}")]
        for name in ("query", "key")
    }
    assert {name: [word.strip() for word in words] for name, words in marked.items()} == {
        "query": ["word20"],
        "key": ["word5"],
    }
    shown = float(tip.text.split("Attention: ")[1])
    assert 0 <= shown <= 1
    ActionChains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()
    assert not tip.is_displayed()


def test_one_scale_for_all_layers(browser):
    """A layer's own scale fills the colours; the shared one compares layers."""
    move(browser, "layer", 2, "2/0")
    own = pixels(browser, "products-change")
    browser.find_element("id", "shared").click()
    wait_until(browser, "return document.body.dataset.scale", "shared")
    shared = pixels(browser, "products-change")
    assert (own != shared).any()
    white = [np.abs(image.astype(int)[..., :3] - 247).sum() for image in (own, shared)]
    # the second layer has moved less than the last
    assert white[1] < white[0]
    browser.find_element("id", "shared").click()
    wait_until(browser, "return document.body.dataset.scale", "layer")


def test_axes_name_tokens(browser):
    box = "document.getElementById('map-attention').closest('figure')"
    ticks = browser.execute_script(
        f"return Array.from({box}.querySelectorAll('.ticks.columns span'), (e) => e.textContent)"
    )
    assert ticks[0] == "0 word0"
    assert ticks[-1] == f"{TOKENS - 1} word{TOKENS - 1}"
    assert browser.execute_script(f"return {box}.querySelector('.across').textContent") == "key (token)"


def test_a_click_on_a_strip_goes_to_its_layer(browser):
    from selenium.webdriver import ActionChains

    strip = browser.find_element("id", "map-norms")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", strip)
    offset = int((1.5 / LAYERS - 0.5) * strip.size["height"])
    ActionChains(browser).move_to_element_with_offset(strip, 0, offset).click().perform()
    wait_for(browser, "2/0")
    assert browser.find_element("id", "layer-out").text == f"2 of {LAYERS}"


def test_screens_light_and_dark(browser, page):
    browser.execute_script("scrollTo(0, 0)")
    light = screenshot(browser)
    dark_browser = open_browser("--blink-settings=preferredColorScheme=0")
    try:
        dark_browser.get(page.as_uri())
        wait_for(dark_browser, f"{LAYERS - 1}/0")
        dark = screenshot(dark_browser)
    finally:
        dark_browser.quit()
    # paper is bright or dark, and between it the maps have their colours
    assert (light.min(-1) > 240).mean() > 0.35
    assert (light.max(-1) < 60).mean() < 0.1
    assert (dark.max(-1) < 60).mean() > 0.35
    assert (dark.min(-1) > 240).mean() < 0.02
    for image in (light, dark):
        colourful = (image.max(-1) - image.min(-1)) > 60
        assert 0.03 < colourful.mean() < 0.6


def test_scales_follow_the_layer_where_states_grow(browser, tmp_path):
    model = build("tape", num_hidden_layers=LAYERS)
    with torch.no_grad():
        for block in model.model.layers[:-1]:
            block.self_attn.encoding.mix_out.mul_(20)
    inspection = inspect_model(model, draw_tokens(1, TOKENS))
    write_page(tmp_path / "grown.html", inspection, title="Grown")
    browser.get((tmp_path / "grown.html").as_uri())
    wait_for(browser, f"{LAYERS - 1}/0")
    for layer in (LAYERS, 1):
        move(browser, "layer", layer, f"{layer}/0")
        ends = browser.execute_script(
            "const box = document.getElementById('map-products').closest('figure');"
            "return Array.from(box.querySelectorAll('.bar span'), (end) => Number(end.textContent));"
        )
        products = inspection.products[layer - 1]
        assert ends == pytest.approx([products.min(), (products.min() + products.max()) / 2, products.max()], rel=0.01)
    # a token with itself at the start is 1, and has its own colour
    drawn = pixels(browser, "products")
    assert len(np.unique(drawn.reshape(-1, 4), axis=0)) > 20
