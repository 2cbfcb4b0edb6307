"""Reading a long text in chunks."""

import math
import runpy
import sys

import pytest
import torch
from long_reading import read_text, write_reading_plot
from torch.nn.functional import cross_entropy

from cases import build, draw_tokens
from equitape.data.tokenizers import byte_tokenizer
from families import make_source
from words import write_text


@pytest.mark.parametrize("kind", ["rope", "tape", "tape2"])
@pytest.mark.parametrize(("chunk", "last"), [(64, 30), (23, 30), (23, 7), (200, 199)])
def test_the_last_tokens_are_scored_as_in_one_go(kind, chunk, last):
    model, tokens = build(kind), draw_tokens(1, 200)[0]
    shown = []
    reading = read_text(model, tokens, "any", chunk=chunk, last=last, show=shown.append)
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    wanted = cross_entropy(logits[-last - 1 : -1].double(), tokens[-last:])
    assert reading.perplexity == pytest.approx(math.exp(wanted), rel=1e-5)
    assert reading.lengths == [each.tokens for each in shown] == [*range(chunk, 200, chunk), 200]
    assert len(reading.microseconds_per_token) == len(shown)
    # after any chunk, the last tokens until the one behind it
    for each in shown[:-1]:
        first = max(1, each.tokens + 1 - last)
        wanted = cross_entropy(logits[first - 1 : each.tokens].double(), tokens[first : each.tokens + 1])
        assert each.perplexity == pytest.approx(math.exp(wanted), rel=1e-5)
    assert reading.cache_gib > 0
    with pytest.raises(ValueError, match="last is 200; it must be at least 1 and below the 200 tokens"):
        read_text(model, tokens, "any", last=200)


def test_reading_ends_where_the_time_does():
    """Each chunk takes a second by a clock that counts its readings."""
    ticks = iter(range(1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("long_reading.now", lambda device: float(next(ticks)))
        reading = read_text(build("rope"), draw_tokens(1, 200)[0], "any", chunk=20, last=5, seconds=4.5)
    assert reading.tokens == 80
    assert reading.lengths == [20, 40, 60, 80]
    assert reading.perplexity == reading.perplexities[-1]


def test_the_plot_has_both_models(tmp_path):
    tokens = draw_tokens(1, 60)[0]
    readings = [read_text(build(kind), tokens, kind, chunk=20, last=5) for kind in ("rope", "tape")]
    write_reading_plot(readings, tmp_path / "plot.svg")
    svg = (tmp_path / "plot.svg").read_text()
    assert "microseconds per token" in svg
    assert readings[0].to_dict()["tokens"] == 60


def test_the_script(tmp_path, monkeypatch, capsys):
    make_source("llama-tied", vocab_size=258, eos_token_id=256, pad_token_id=257).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    write_text(tmp_path / "data", documents=1, words=60)
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    given = ["tape", "--base", tmp_path / "base", "--data", tmp_path / "data", "--tokens", 900, "--chunk", 256]
    given += ["--rope-tokens", 400, "--last", 50, "--output", tmp_path / "r.json", "--plot", tmp_path / "r.png"]
    monkeypatch.setattr(sys, "argv", ["long_reading.py", *map(str, given)])
    runpy.run_path("benchmarks/long_reading.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert "TAPE: 900 tokens in" in printed
    assert "RoPE: 400 tokens in" in printed
    assert "perplexity of the last 50" in printed
    assert (tmp_path / "r.png").stat().st_size > 0
