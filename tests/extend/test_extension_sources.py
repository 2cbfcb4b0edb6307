"""Extensions of a GGUF file, and with a dataset by name."""

import pytest

import equitape
from equitape.extend.prepare import prepare
from equitape.extend.settings import ExtendSettings
from families import make_source
from gguf_files import write_gguf

pytestmark = pytest.mark.usefixtures("no_drawing")


def test_a_gguf_file_is_extended(room, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(make_source(vocab_size=258, max_position_embeddings=32), tmp_path / "tiny.gguf")
    options = {"data": [str(room / "data")], "eval_data": [str(room / "test")], "tokenizer": str(room / "base")}
    options |= {"measure": ["perplexity"], "steps": 1, "batch_size": 2}
    extension = equitape.extend(tmp_path / "tiny.gguf", 64, out=tmp_path / "out", **options)
    assert (extension.context, extension.to) == (32, 64)
    assert extension.reports["extended"]["perplexity"].metrics["perplexity_64"] > 1
    assert equitape.load_adapter(tmp_path / "tiny.gguf", tmp_path / "out").config.context == 64
    assert f"--base {tmp_path / 'tiny.gguf'}" in (tmp_path / "out/README.md").read_text()


def test_a_dataset_by_name(room, monkeypatch):
    """Its documents are the training text; a name that cannot be loaded is refused before any work."""
    datasets = pytest.importorskip("datasets")

    def load(name, config, split, streaming):
        if name != "owner/poems":
            raise FileNotFoundError("no such dataset")
        return iter([{"text": f"{split} poem {number} of the sea. " * 20} for number in range(8)])

    monkeypatch.setattr(datasets, "load_dataset", load)

    def prepared(name):
        options = {"steps": 1, "batch_size": 2, "measure": ("perplexity",)}
        return prepare(room / "base", ExtendSettings(to=64, data=(name,), eval_data=(str(room / "test"),), **options))

    text = "".join(f"train poem {number} of the sea. " * 20 for number in range(8))
    assert prepared("hf:owner/poems").text.train == len(text) + 8
    with pytest.raises(ValueError, match=r"Cannot load the dataset .* \(no such dataset\)"):
        prepared("hf:owner/prose")
