"""One sentence where input does not fit; what a saved model says where equitape was not imported."""

import json
import subprocess
import sys

import pytest
import torch

from cases import gap
from equitape import EquitapeConfig, EquitapeForCausalLM
from equitape.encodings import build_encoding
from equitape.encodings.positions import Positions

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def make(encoding="rope", **changes):
    return EquitapeForCausalLM(EquitapeConfig(**SIZES, encoding=encoding, **changes)).eval()


@pytest.mark.parametrize("wrong", [40, -1])
def test_ids_beyond_the_vocabulary(wrong):
    with pytest.raises(ValueError, match=rf"input_ids contains {wrong}; the model's vocabulary has the ids 0 to 39"):
        make()(torch.tensor([[1, wrong, 2]]))


def test_prefix_tuning_on_tape_is_refused():
    peft = pytest.importorskip("peft")
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tokens = torch.randint(0, 40, (1, 6))
    assert peft.get_peft_model(make(), settings)(tokens).logits.isfinite().all()
    with pytest.raises(ValueError, match="Prefix tuning makes such caches; use LoRA or prompt tuning"):
        peft.get_peft_model(make("tape"), settings)(tokens)


def test_xpos_outside_the_decoder_counts_from_zero():
    config = make("xpos").config
    encoding = build_encoding(config.encoding, config.geometry)
    ids = torch.arange(9)[None]
    plain = encoding("initial_state", Positions(ids), torch.float32)
    exact = encoding("initial_state", Positions(ids, origin=torch.zeros(1, 1, dtype=torch.long)), torch.float32)
    assert torch.equal(plain, exact)


WITHOUT = """
import sys
if sys.argv[2] == "absent":
    sys.modules["equitape"] = None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=sys.argv[2] != "untrusted")
import torch
print(model(torch.arange(12)[None]).logits.sum().item())
model.save_pretrained(sys.argv[1] + "/again")
"""


def load_elsewhere(folder, how):
    code = [sys.executable, "-c", WITHOUT, str(folder), how]
    return subprocess.run(code, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_a_saved_model_says_what_it_needs(tmp_path):
    model = make("tape")
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"]["AutoModelForCausalLM"] == "equitape_model.EquitapeForCausalLM"
    assert "pip install equitape" in (tmp_path / "equitape_model.py").read_text()
    # with the package imported nothing is asked, and the file leaves no trace in the configuration
    again = EquitapeForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(again.config, "auto_map")
    trusted = load_elsewhere(tmp_path, "trusted")
    assert trusted.returncode == 0, trusted.stderr
    with torch.no_grad():
        expected = model(torch.arange(12)[None]).logits.sum()
    assert gap(torch.tensor(float(trusted.stdout)), expected) < 1e-4
    assert sorted(path.name for path in (tmp_path / "again").iterdir() if path.suffix == ".py") == ["equitape_model.py"]
    untrusted = load_elsewhere(tmp_path, "untrusted")
    assert "contains custom code" in untrusted.stderr
    absent = load_elsewhere(tmp_path, "absent")
    assert absent.returncode != 0
    assert "needs the Python package equitape; run: pip install equitape" in absent.stderr.splitlines()[-1]


def test_gguf_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be saved as '.*model.gguf': no architecture of llama.cpp passes"):
        make("tape").save_pretrained(tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
