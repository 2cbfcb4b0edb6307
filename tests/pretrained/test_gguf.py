"""GGUF files, written here by the format's own package, and read as a model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cases import draw_tokens, gap
from equitape import adapt
from equitape.pretrained.native import save_native
from families import make_source
from gguf_files import write_gguf

pytest.importorskip("gguf")


def test_a_gguf_file(tmp_path):
    source = make_source(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    path = tmp_path / "tiny.gguf"
    write_gguf(source, path)
    model = adapt(path, "tape")
    assert model.dtype == torch.float32
    assert model.config.encoding["theta"] == 5000.0
    tokens = draw_tokens(2, 30)
    with torch.no_grad():
        assert gap(model(tokens).logits, source(tokens).logits) < 1e-5
    # nothing of the file's packing is left that would keep the model from being saved
    model.save_pretrained(tmp_path / "whole")
    half = adapt(path, "lora", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    save_native(path, half, None, tmp_path / "native")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "native").dtype == torch.bfloat16
    assert adapt(tmp_path / "whole", "lora").config.encoding["kind"] == "tape"


def test_a_gguf_file_without_a_weight(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(make_source(), path, without=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(ValueError, match=r"Cannot read .*lacks 1 of .* 'model.layers.1.mlp.up_proj.weight'"):
        adapt(path)
