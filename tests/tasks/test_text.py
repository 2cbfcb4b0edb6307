"""The text task: rows to train on, and the same tokens scored at every length."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from cases import build
from equitape.data.packing import PackedDataset
from equitape.data.streaming import StreamedRows
from equitape.settings import describe_settings
from equitape.tasks import build_task
from equitape.tasks.text import TextOptions

LENGTH = 16


@pytest.fixture
def options(tmp_path):
    for name, count in (("train", 60), ("valid", 40)):
        folder = tmp_path / name
        folder.mkdir()
        for number in range(3):
            text = "".join(f"{name} {number}: line {n} says é {n * 37 % 11}\n" for n in range(count + number))
            (folder / f"{number}.txt").write_text(text)
    return {
        "train": str(tmp_path / "train"),
        "valid": [str(tmp_path / "valid")],
        "length": LENGTH,
        "cache": str(tmp_path / "cache"),
        "eval_tokens": 1024,
    }


def model_for(task, case="tape", options=None, **changes):
    return build(case, options, vocab_size=task.vocab_size, pad_token_id=task.pad_token_id, **changes)


def test_every_length_scores_the_same_tokens_against_full_logits(options):
    task = build_task("text", options)
    model = model_for(task, max_position_embeddings=256)
    metrics = task.evaluate(model, seed=0).metrics
    # all documents end to end in pieces of 8 x 16 tokens and one more; 1024 tokens of them, evenly spread
    pieces = []
    for path in sorted((task_folder(options) / "valid").iterdir()):
        tokens = torch.tensor(list(path.read_bytes()))
        pieces += [tokens[s : s + 129] for s in range(0, len(tokens) - 128, 128)]
    places = [round(n * (len(pieces) - 1) / 7) for n in range(8)]
    assert len(pieces) > 8
    for factor in (1, 2, 4, 8):
        length = factor * LENGTH
        losses = []
        for place in places:
            for start in range(0, 128, length):
                rows = pieces[place][start : start + length + 1]
                logits = model(input_ids=rows[None, :-1]).logits[0].detach()
                losses += cross_entropy(logits, rows[1:], reduction="none").tolist()
        assert len(losses) == 1024
        name = "1x" if factor == 1 else f"outside_{factor}x"
        expected = sum(losses) / len(losses)
        assert math.log(metrics[f"perplexity_{name}"]) == pytest.approx(expected, abs=1e-10)
        # a token is a byte
        assert metrics[f"bits_per_byte_{name}"] == pytest.approx(expected / math.log(2))
    assert len(metrics) == 8
    assert task.headline in metrics


def task_folder(options):
    return Path(options["train"]).parent


def test_curves(options):
    task = build_task("text", options)
    evaluation = task.evaluate(model_for(task), seed=0)
    length, place = evaluation.curves
    assert length.x == [16.0, 32.0, 64.0, 128.0]
    assert length.y[0] == evaluation.metrics["perplexity_1x"]
    assert len(place.x) == 64
    assert place.x[-1] == pytest.approx(127.5)
    assert sum(place.y) / 64 == pytest.approx(math.log(evaluation.metrics["perplexity_outside_8x"]))


def test_a_share_scores_less(options, monkeypatch):
    task = build_task("text", options)
    seen = []
    score = task._score
    monkeypatch.setattr(
        task,
        "_score",
        lambda model, pieces, *rest, **more: seen.append(len(pieces)) or score(model, pieces, *rest, **more),
    )
    model = model_for(task, "rope")
    task.evaluate(model, seed=0, share=0.25)
    task.evaluate(model, seed=0, share=1e-9)
    assert seen == [2] * 4 + [1] * 4


def test_a_learned_table_ends_and_the_rest_is_reported(options, caplog):
    task = build_task("text", options)
    model = model_for(task, "learned", {"num_positions": 40})
    with caplog.at_level(logging.WARNING):
        evaluation = task.evaluate(model, seed=0)
    metrics = evaluation.metrics
    assert all(math.isfinite(math.log(metrics[f"perplexity_{name}"])) for name in ("1x", "outside_2x"))
    assert all(math.isnan(value) for name, value in metrics.items() if "4x" in name or "8x" in name)
    assert "Length 64 cannot be scored: Position id 63 is beyond the learned table of 40 rows" in caplog.text
    assert len(evaluation.curves[1].x) == 32
    with pytest.raises(ValueError, match="beyond the learned table of 8 rows"):
        task.evaluate(model_for(task, "learned", {"num_positions": 8}), seed=0)


def test_rows_to_train_on(options):
    task = build_task("text", options)
    assert (task.trained_length, task.tested_length) == (16, 128)
    assert (task.vocab_size, task.pad_token_id, task.eos_token_id) == (258, 257, 256)
    dataset = task.training_set(seed=5)
    assert isinstance(dataset, PackedDataset)
    assert len(dataset) == 10**9
    rows = dataset.report.rows
    batch = task.collate([dataset[i] for i in range(rows)])
    assert batch["input_ids"].shape == (rows, LENGTH)
    assert "segment_ids" in batch
    assert dataset[3]["input_ids"].equal(task.training_set(seed=5)[3]["input_ids"])
    assert not dataset[3]["input_ids"].equal(task.training_set(seed=6)[3]["input_ids"])
    loss = model_for(task)(**task.collate([dataset[i] for i in range(4)])).loss
    assert torch.isfinite(loss)


def test_whole_rows_and_minimum_length(options):
    task = build_task("text", {**options, "whole_rows": True})
    dataset = task.training_set(seed=0)
    assert not any("segment_ids" in dataset[i] for i in range(dataset.report.rows))
    with pytest.raises(ValueError, match="No document has 99999 tokens"):
        build_task("text", {**options, "min_document_tokens": 99999}).training_set(seed=0)


def test_streaming_needs_no_cache_of_the_training_text(options, tmp_path):
    task = build_task("text", {**options, "stream": True})
    dataset = task.training_set(seed=0)
    assert isinstance(dataset, StreamedRows)
    assert dataset[0]["input_ids"].shape == (LENGTH,)
    # the held-out text alone
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


def test_a_trained_vocabulary(options):
    task = build_task("text", {**options, "tokenizer": "bpe:300", "length": 4})
    assert 258 < task.vocab_size <= 300
    metrics = task.evaluate(model_for(task, "rope"), seed=0).metrics
    sizes = [len(document) for document in (task.valid_store.document(i, end=False) for i in range(3))]
    num_bytes = sum(path.stat().st_size for path in (task_folder(options) / "valid").iterdir())
    assert sum(sizes) < num_bytes
    expected = math.log(metrics["perplexity_1x"]) / math.log(2) * sum(sizes) / num_bytes
    assert metrics["bits_per_byte_1x"] == pytest.approx(expected)


def test_a_tokenizer_from_a_folder(options, tmp_path):
    first = build_task("text", {**options, "tokenizer": "bpe:300", "length": 4})
    first.tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    second = build_task("text", {**options, "tokenizer": str(tmp_path / "tokenizer"), "length": 4})
    assert second.valid_store.facts.digest == first.valid_store.facts.digest


def test_short_documents_are_scored_joined(options, tmp_path):
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": f"number {n}"}) + "\n" for n in range(60)))
    options = {**options, "valid": str(tmp_path / "short.jsonl")}
    with pytest.raises(ValueError, match=r"longest of the held-out documents has 9 tokens, and 129 are needed .*join"):
        build_task("text", options)
    joined = build_task("text", {**options, "join": True})
    assert bytes(joined._pieces[0].tolist()[:8]) == b"number 0"
    assert int(joined._pieces[0][8]) == joined.eos_token_id
    # end tokens are scored, so what they cost is spread over the bytes too
    metrics = joined.evaluate(model_for(joined, "rope"), seed=0).metrics
    num_bytes = sum(len(f"number {n}") for n in range(60))
    expected = math.log2(metrics["perplexity_1x"]) * (num_bytes + 60) / num_bytes
    assert metrics["bits_per_byte_1x"] == pytest.approx(expected)
    few = build_task("text", {**options, "join": True, "valid_documents": 20})
    assert len(few.valid_store) == 20
    assert len(few._pieces) < len(joined._pieces)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": []}, "has no text: set the option train to a file"),
        ({"valid": "lost"}, "Task 'text', option valid: There is no file or folder 'lost'"),
        ({"tokenizer": "bpe"}, "'bpe' must say the size of its vocabulary, as bpe:8192"),
        ({"tokenizer": "bpe:many"}, "must say the size of its vocabulary, as bpe:8192"),
        ({"tokenizer": "bpe:100"}, "needs at least 258 entries"),
        ({"tokenizer": "lost/folder"}, "There is no tokenizer in 'lost/folder'"),
        ({"length": 1}, "length is 1; it must be a whole number of 2 or more"),
        ({"factors": [2, 4]}, r"factors is \[2, 4\]; 1 must be among them"),
        ({"factors": [1, 0.5]}, "each a whole number"),
        ({"eval_tokens": 0}, "eval_tokens is 0; it must be a whole number of 1 or more"),
        ({"lenght": 8}, "Task 'text' has no option 'lenght'. Did you mean 'length'"),
    ],
)
def test_refusals(options, change, message):
    with pytest.raises(ValueError, match=message):
        build_task("text", {**options, **change})


def test_defaults_can_be_described():
    assert describe_settings(TextOptions)["factors"] == (1, 2, 4, 8)


def test_a_small_model_learns(options):
    """A few steps on the rows bring the score down, also of the lengths outside."""
    task = build_task("text", options)
    model = model_for(task, "rope", dtype=torch.float32)
    before = task.evaluate(model, seed=0, share=0.3).metrics
    dataset = task.training_set(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(30):
        batch = task.collate([dataset[step * 8 + i] for i in range(8)])
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = task.evaluate(model, seed=0, share=0.3).metrics
    assert after["bits_per_byte_1x"] < before["bits_per_byte_1x"] - 1
    assert after["bits_per_byte_outside_8x"] < before["bits_per_byte_outside_8x"] - 1
