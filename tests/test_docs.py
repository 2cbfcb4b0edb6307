"""The documentation is true: its Python runs, its links lead somewhere, its tables agree with the code."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch
import yaml
from pymdownx.slugs import slugify

import equitape
from equitape import available_encodings
from equitape.adapt import adapt
from equitape.data.tokenizers import byte_tokenizer
from equitape.encodings import build_encoding
from equitape.encodings.base import ENCODINGS
from equitape.encodings.options import Geometry
from equitape.version import __version__

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md")])


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def save_small_llama(folder):
    """A model under the name that the README takes from the Hub."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=258, bos_token_id=None, eos_token_id=256, **sizes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In order and in one namespace; the tutorial's own asserts check what it promises."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "token-cache"))
    if page == ROOT / "README.md":
        save_small_llama(tmp_path / "HuggingFaceTB/SmolLM2-135M")
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


def links(page):
    """(path, anchor) of every relative link of a page; code is left out."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text)
    return [(path, anchor) for path, anchor in found if "://" not in path and not path.startswith("mailto:")]


def anchors(page):
    """The anchors that headings of a page get, on GitHub and in the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {slugify(case="lower")(re.sub(r"[`*]", "", title), "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for path, anchor in links(page):
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def test_the_site_builds_without_a_warning(tmp_path):
    """In strict mode, so that a page missing from the site, or a docstring it cannot read, fails."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    assert (tmp_path / "site/explanation/reproduction/index.html").exists()
    page = (tmp_path / "site/reference/api/index.html").read_text()
    described = {name.rpartition(".")[2] for name in re.findall(r'<h\d id="([^"]+)"', page)}
    assert set(equitape.__all__) - {"__version__"} <= described


def read_table(page, first):
    """The rows of the first table whose heading begins with `first`, as dictionaries."""
    lines = page.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first} |"))
    heading, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[start : next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))]
    ]
    return [dict(zip(heading, row, strict=True)) for row in rows]


def test_the_support_matrix_says_what_encodings_declare():
    rows = {row["encoding"].strip("`"): row for row in read_table(ROOT / "docs/reference/support.md", "encoding")}
    assert set(rows) == set(available_encodings())
    geometry = Geometry(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=2)
    for kind, row in rows.items():
        encoding = build_encoding({"kind": kind}, geometry).eval()
        fused = [name.removesuffix("_attention") for name in encoding.backends if name != "eager"]
        declared = {
            "cache": encoding.cache_refusal is None,
            "dense bias": encoding.adds_bias,
            "shift invariant": encoding.shift_invariant,
            "both directions": not encoding.needs_causal,
            "several axes": takes_axes(kind, geometry),
        }
        assert {name: row[name] for name in declared} == {
            name: "yes" if is_so else "no" for name, is_so in declared.items()
        }
        assert row["fused attention"] == ", ".join(fused), kind


def takes_axes(kind, geometry):
    """Whether the encoding can be built for ids of two axes."""
    try:
        build_encoding({"kind": kind}, dataclasses.replace(geometry, num_axes=2))
    except ValueError:
        return False
    return True


def test_the_support_matrix_says_what_can_be_adapted(tmp_path):
    """A saved model of every kind is given to `adapt`, which refuses those it cannot extend."""
    from equitape import EquitapeConfig, EquitapeForCausalLM

    for row in read_table(ROOT / "docs/reference/support.md", "encoding"):
        kind = row["encoding"].strip("`")
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        EquitapeForCausalLM(EquitapeConfig(vocab_size=30, encoding=kind, **sizes)).save_pretrained(tmp_path / kind)
        if row["adapt"] == "yes":
            adapt(tmp_path / kind, method="tape", context=4096, scaling="linear")
        else:
            with pytest.raises(ValueError, match=kind):
                adapt(tmp_path / kind, method="tape")


def test_every_environment_variable_is_documented():
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    page = (ROOT / "docs/reference/environment.md").read_text()
    for name in set(re.findall(r"EQUITAPE_[A-Z0-9]+", sources)):
        assert f"| `{name}` |" in page, f"environment.md says nothing of {name}"


def test_every_command_is_documented():
    from equitape.cli import app

    page = (ROOT / "docs/reference/commands.md").read_text()
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    for name in names:
        assert re.search(rf"^\| `equitape {name}\b", page, flags=re.MULTILINE), f"commands.md says nothing of {name}"


def test_changelog_and_citation_name_this_version():
    version = __version__.split(".dev")[0]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version


def test_every_option_is_documented():
    for kind in available_encodings():
        page = (ROOT / f"docs/reference/encodings/{kind}.md").read_text()
        for option in dataclasses.fields(ENCODINGS[kind].options_class):
            assert f"`{option.name}" in page, f"{kind}.md says nothing of {option.name}"


def source_texts():
    """Every string in the sources, with "..." for what is filled in."""
    for path in ROOT.glob("src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_quoted_errors_exist():
    texts = "\n".join(source_texts())
    headings = re.findall(r"^\*\*(\".*?)\*\*", (ROOT / "docs/how-to/errors.md").read_text(), flags=re.MULTILINE)
    quoted = [message for heading in headings for message in re.findall(r'"(.*?)"', heading)]
    parts = [part.strip() for message in quoted for part in message.replace("NAME", "...").split("...")]
    assert len(quoted) >= 8
    assert [part for part in parts if part not in texts] == []
