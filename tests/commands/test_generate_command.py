"""equitape generate and chat."""

import math

import pytest
import torch
from tokenizers import processors

from cases import build
from command_line import call, invoke
from equitape.data.tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two small models with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind in (("one", "tape"), ("two", "rope")):
        build(kind, vocab_size=258, num_hidden_layers=2).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def test_text_is_generated_from_a_prompt(models):
    first = call("generate", models / "one", "Once upon", "--max-tokens", 4, "--device", "cpu")
    assert (
        first.output == call("generate", models / "one", "--max-tokens", 4, "--device", "cpu", input="Once upon").output
    )
    drawn = [
        call(
            "generate", models / "one", "Once", "--max-tokens", 8, "--temperature", 1, "--seed", seed, code=None
        ).output
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_two_models_side_by_side(models):
    result = call("generate", models / "one", "Once upon", "--base", models / "two", "--max-tokens", 4)
    assert result.output.splitlines()[0].count("╭") == 2
    assert all(f" {name} " in result.output for name in ("one", "two"))


def test_a_conversation_ends_with_an_empty_line(models):
    result = call("chat", models / "one", "--max-tokens", 3, input="Hello\nAgain\n\n")
    assert result.output.count("you") == 3


@pytest.mark.parametrize("template", ["{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", None])
def test_a_prompt_has_one_start_token(template, monkeypatch):
    """Templates of Llama and Gemma begin with the token that their tokenizers add too."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, start)]
    )
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = template
    model = build("tape", vocab_size=258, num_hidden_layers=2)
    seen = []
    generate = model.generate

    def remember(**inputs):
        seen.append(inputs["input_ids"][0].tolist())
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", remember)
    monkeypatch.setattr("equitape.commands.generate.load_writers", lambda *_: {"one": (model, tokenizer)})
    call("chat", "one", "--max-tokens", 2, input="Hi\n\n")
    assert seen == [[start, *b"Hi"] if template else [start, *b"Hi\n"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["ONE", ""], "The prompt is empty"), (["/nowhere", "Hello"], "There is no model at")],
)
def test_refusals(models, arguments, message):
    assert message in invoke("generate", *(models / "one" if part == "ONE" else part for part in arguments), code=2)


@pytest.mark.parametrize("temperature", [0, 1])
def test_nan_is_no_text(temperature, tmp_path):
    model = build("tape", vocab_size=258, num_hidden_layers=2)
    torch.nn.init.constant_(model.get_output_embeddings().weight, math.nan)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    result = invoke("generate", tmp_path, "Once upon", "--max-tokens", 3, "--temperature", temperature, code=2)
    assert "The model gives NaN instead of scores: its weights have NaN or infinity" in result
