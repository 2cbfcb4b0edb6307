"""Texts of a fine-tuning run: the order in which rows are trained on, and perplexity before and after."""

import numpy as np
import pytest
import torch

from cases import draw_tokens
from equitape.adapt.evaluation import EvalSettings, join_scores, score
from equitape.adapt.finetune import FinetuneSettings, read_data
from equitape.data.tokenizers import byte_tokenizer
from equitape.data.tokens import store_in_memory
from equitape.training.settings import TrainSettings
from families import make_source


def scored_by_hand(model, documents, length, stride):
    """(losses, windows): a window every `stride` tokens, the last one moved back, counted where no earlier one has."""
    losses, windows = [], 0
    for tokens in documents:
        start = reached = 0
        while reached < len(tokens) - 1:
            start = min(start, len(tokens) - 1 - length)
            with torch.no_grad():
                logits = model(tokens[None, start : start + length]).logits[0]
            found = torch.nn.functional.cross_entropy(
                logits.double(), tokens[start + 1 : start + length + 1], reduction="none"
            )
            losses += found[reached - start :].tolist()
            reached, start, windows = start + length, start + stride, windows + 1
    return losses, windows


@pytest.mark.parametrize("stride", [4, None])
def test_scores_are_those_of_windows_at_the_stride(stride):
    model = make_source()
    documents = [draw_tokens(1, size, seed=size)[0] for size in (29, 17)]
    store = store_in_memory([tokens.numpy() for tokens in documents], [29, 17], byte_tokenizer())
    found = score(model, {"books": store}, EvalSettings(stride=stride, windows=None), (8, 16), bf16=False)
    assert [(entry["data"], entry["length"]) for entry in found] == [("books", 8), ("books", 16)]
    for entry, length in zip(found, (8, 16), strict=True):
        losses, windows = scored_by_hand(model, documents, length, stride or length)
        assert (entry["tokens"], entry["windows"], entry["documents"]) == (28 + 16, windows, 2)
        assert entry["stride"] == (stride or length)
        assert entry["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert entry["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


def test_before_and_after_are_joined_by_length():
    before = [{"data": name, "length": 8, "loss": loss, "perplexity": 10 * loss} for name, loss in (("a", 1), ("b", 2))]
    after = [{**entry, "loss": 5 * entry["loss"], "perplexity": 70 * entry["loss"]} for entry in before]
    names = ("data", "length", "loss_before", "loss_after", "perplexity_before", "perplexity_after")
    found = [tuple(entry[name] for name in names) for entry in join_scores(before, after)]
    assert found == [("a", 8, 1, 5, 10, 70), ("b", 8, 2, 10, 20, 140)]
    assert all(set(entry) == set(names) for entry in join_scores(before, after))
    unfinished = [tuple(entry[name] for name in names) for entry in join_scores(before, None)]
    assert unfinished == [("a", 8, 1, None, 10, None), ("b", 8, 2, None, 20, None)]


def test_the_seed_of_training_decides_the_order_of_rows(tmp_path):
    (tmp_path / "text.txt").write_text("".join(chr(97 + index % 26) + str(index) for index in range(200)))

    def rows(seed):
        train = TrainSettings(steps=1, seed=seed)
        settings = FinetuneSettings(data=(str(tmp_path / "text.txt"),), train=train, cache=str(tmp_path / "cache"))
        read, _ = read_data(settings, byte_tokenizer(), 16)
        return [read[index]["input_ids"].tolist() for index in range(len(read))]

    first, again, other = rows(0), rows(0), rows(1)
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
