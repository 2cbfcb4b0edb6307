"""examples/retrieval_pointers.py: a token without updates points at itself, and switched-off updates change nothing."""

import importlib.util
from pathlib import Path

import torch

from equitape import EquitapeConfig, EquitapeForCausalLM
from equitape.tasks.retrieval import Retrieval, RetrievalOptions

PATH = Path(__file__).resolve().parents[1] / "examples" / "retrieval_pointers.py"


def test_pointers(tmp_path):
    spec = importlib.util.spec_from_file_location("retrieval_pointers", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    task = Retrieval(RetrievalOptions(length=32, needles=3, queries=2, keys=8, values=8, noise_tokens=8))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    encoding = {"kind": "tape2", "init_scale": 1.0}
    model = EquitapeForCausalLM(EquitapeConfig(vocab_size=task.vocab_size, **sizes, encoding=encoding)).eval()

    tokens, needles = example.draw(task, 4, 32)
    queries = example.query_places(task, 32)
    assert torch.equal(tokens.gather(1, needles), tokens[:, queries])

    still = example.without(model, list(example.PARTS), [0, 1, 2])
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
