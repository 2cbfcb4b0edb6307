"""One sentence where input does not fit; what a saved model needs without equitape."""

import json
import subprocess
import sys

import pytest
import torch

from cases import randomise
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": torch.tensor([[1.0, 2.0]])}, r"input_ids is torch\.float32; it must be integer"),
        ({"input_ids": torch.tensor([1, 2])}, r"input_ids has shape \[2\]; it must be \[B, N\]"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids has no tokens; give at least one"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, "input_ids has no rows; give at least one"),
        (
            {"inputs_embeds": torch.zeros(1, 3, 32, dtype=torch.long)},
            r"inputs_embeds is torch\.int64; it must be float",
        ),
        ({"inputs_embeds": torch.zeros(3, 32)}, r"inputs_embeds has shape \[3, 32\]; it must be \[B, N, C\]"),
        (
            {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 40]])},
            "labels contains 40; the model's voc",
        ),
        (
            {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[-100, -5]])},
            "labels contains -5; the model's",
        ),
    ],
)
def test_tokens_of_a_wrong_kind(given, message):
    with pytest.raises(ValueError, match=message):
        make("tape")(**given)


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


ELSEWHERE = """
import sys
import torch
from transformers import AutoModelForCausalLM

def load(**options):
    try:
        return AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
    except Exception as error:
        print(" ".join(str(error).split()))

load(trust_remote_code=False)
sys.modules["equitape"] = None
load(trust_remote_code=True)
del sys.modules["equitape"]
model = load(trust_remote_code=True)
print(model(torch.arange(12)[None]).logits.sum().item())
model.save_pretrained(sys.argv[1] + "/again")
"""


def test_a_saved_model_says_what_it_needs(tmp_path):
    """In a process that has not imported equitape: without trust, without the package, and with both."""
    model = make("tape")
    randomise(model)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"]["AutoModelForCausalLM"] == "equitape_model.EquitapeForCausalLM"
    assert "pip install equitape" in (tmp_path / "equitape_model.py").read_text()
    # with the package imported nothing is asked, and the file leaves no trace in the configuration
    again = EquitapeForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(again.config, "auto_map")
    code = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    process = subprocess.run(code, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert process.returncode == 0, process.stderr
    untrusted, absent, total = process.stdout.splitlines()
    assert "contains custom code" in untrusted
    assert "needs the Python package equitape; run: pip install equitape" in absent
    with torch.no_grad():
        expected = model(torch.arange(12)[None]).logits.sum().item()
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert sorted(path.name for path in (tmp_path / "again").iterdir() if path.suffix == ".py") == ["equitape_model.py"]


def test_gguf_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be saved as '.*model.gguf': no architecture of llama.cpp passes"):
        make("tape").save_pretrained(tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
