"""examples/*_pointers.py: a token without updates points at itself, and switched-off updates change nothing."""

import sys
from pathlib import Path

import pytest
import torch

from equitape import EquitapeConfig, EquitapeForCausalLM
from equitape.tasks.addition import VOCAB_SIZE
from equitape.tasks.retrieval import Retrieval, RetrievalOptions

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """As scripts, they import their neighbour."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("pointing", "retrieval_pointers", "addition_pointers"):
        sys.modules.pop(name, None)


def build(vocab_size):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    encoding = {"kind": "tape2", "init_scale": 1.0}
    return EquitapeForCausalLM(
        EquitapeConfig(vocab_size=vocab_size, initializer_range=0.3, **sizes, encoding=encoding)
    ).eval()


def test_retrieval(tmp_path):
    import pointing
    import retrieval_pointers as example

    task = Retrieval(RetrievalOptions(length=32, needles=3, queries=2, keys=8, values=8, noise_tokens=8))
    model = build(task.vocab_size)
    tokens, needles = example.draw(task, 4, 32)
    queries = example.query_places(task, 32)
    assert torch.equal(tokens.gather(1, needles), tokens[:, queries])

    still = pointing.without(model, list(pointing.PARTS), [0, 1, 2])
    assert (example.pointers(still, tokens, queries) == queries).all()
    assert not (example.pointers(model, tokens, queries) == queries).all()

    found = example.measure(model, task, 4, 2)
    assert found["accuracy"]["no update"] == example.accuracy(still, task, tokens)
    assert len(found["short"]["share"]) == 3
    assert len(found["long"]["share"][0]) == 2
    # attention of a query to one key is less than all of it
    assert all(0 <= share < 1 for block in found["attention"]["key"] for share in block)
    example.draw_picture(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_addition(tmp_path):
    import addition_pointers as example
    import pointing

    model = build(VOCAB_SIZE)
    still = pointing.without(model, list(pointing.PARTS), [0, 1, 2])
    digits = (3, 5)
    tokens = example.draw(digits, 6)

    # without updates two fields are alike by the distance of their positions: the same along every diagonal
    alike = example.likeness(pointing.fields(still, tokens)[1])[0]
    assert all(torch.allclose(diagonal, diagonal[:1]) for diagonal in (alike.diagonal(n) for n in range(len(alike))))
    assert torch.allclose(alike.diagonal(), torch.ones(len(alike)))
    moved = example.likeness(pointing.fields(model, tokens)[1])[0]
    assert not torch.allclose(moved.diagonal(3), moved.diagonal(3)[:1], atol=1e-2)

    # holding every frequency is a model without updates; holding none changes nothing
    count = model.config.geometry.head_dim // 2
    with torch.no_grad():
        expected = [each(tokens).logits for each in (model, still)]
    for frequencies, logits in zip(([], list(range(count))), expected, strict=True):
        with example.held(model, frequencies, tokens), torch.no_grad():
            assert torch.allclose(model(tokens).logits, logits, atol=1e-5)
    assert not torch.allclose(*expected, atol=1e-2)

    # the token that writes place 1 stands before it; its attention to the first number sums to less than 1
    attended = example.attention_to_place(model, digits, tokens)
    every = pointing.attentions(model, tokens)
    assert attended["second"][1, 0, 2] == every[1][:, 0, sum(digits) + 1 + 2, 3 + 1 + 2].mean()
    assert attended["first"].shape == (3, 2, 3)

    found = example.measure(model, digits, [4, 6], 6)
    assert set(found["accuracy"]) == {4, 6}
    example.draw_picture(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
