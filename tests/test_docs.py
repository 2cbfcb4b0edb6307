"""What the documentation shows, works."""

import re
from pathlib import Path

import pytest

from equitape import available_encodings
from equitape.encodings.base import ENCODINGS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In order and in one namespace; the tutorial's own asserts check what it promises."""
    monkeypatch.chdir(tmp_path)
    before = set(ENCODINGS)
    namespace = {"__name__": "docs"}
    try:
        for block in python_blocks(page):
            exec(compile(block, page.name, "exec"), namespace)
    finally:
        for kind in set(ENCODINGS) - before:
            ENCODINGS.unregister(kind)


def test_tutorial_registers_one_encoding_with_one_registration():
    text = "".join(python_blocks(ROOT / "docs/how-to/add-an-encoding.md"))
    assert text.count("@register_encoding(") == 1


def test_every_encoding_has_a_page_that_the_index_links():
    index = (ROOT / "docs/reference/encodings/README.md").read_text()
    for kind in available_encodings():
        assert (ROOT / f"docs/reference/encodings/{kind}.md").exists()
        assert f"({kind}.md)" in index


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_option_is_documented():
    for kind in available_encodings():
        page = (ROOT / f"docs/reference/encodings/{kind}.md").read_text()
        for name in ENCODINGS[kind].options_class.__dataclass_fields__:
            assert f"`{name}" in page, f"{kind}.md says nothing of {name}"
