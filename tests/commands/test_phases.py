"""Every command that works for long names what it is doing."""

import pytest
import torch
from typer.testing import CliRunner

from cases import build
from equitape.cli import app
from equitape.data.tokenizers import byte_tokenizer
from equitape.runs.progress import Progress

RECIPE = """
name: small
task: {name: addition, trained_digits: 1, tested_digits: 2, samples: 2}
model: {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 2}
encodings: [rope, nope]
train: {steps: 1, batch_size: 2}
"""
LOADING, RUN = "loading the model", ["loading the model", "training", "scoring"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    sizes = {"vocab_size": 258, "pad_token_id": 257, "eos_token_id": 256, "num_hidden_layers": 2}
    build("tape", dtype=torch.float32, **sizes).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text("All good text is much alike. " * 40)
    (folder / "small.yaml").write_text(RECIPE)
    return folder


@pytest.mark.parametrize(
    ("words", "phases"),
    [
        (["train", "small.yaml"], ["reading the data", *RUN]),
        (["compare", "small.yaml"], ["reading the data", "all runs: 2", *RUN, *RUN]),
        (
            ["eval", "model", "--task", "perplexity", "--task", "passkey", "data=text.txt", "lengths=[300]", "samples=1",
             "passkey.depths=[0]", "passkey.short=300", "perplexity.short=8"],
            [LOADING, "preparing perplexity", "preparing passkey", "all runs: 2", "perplexity", "passkey"],
        ),
        (
            ["inspect", "model", "--ids", "1 2 3", "--also", "other=model"],
            [LOADING, "loading other", "recording attention and states", "measuring stability", "writing the page"],
        ),
        (["check", "model", "--dtype", "float32", "--tokens", "8"], [LOADING, "checking"]),
    ],
    ids=["train", "compare", "eval", "inspect", "check"],
)  # fmt: skip
def test_phases(words, phases, home, tmp_path, monkeypatch):
    seen = []

    def record(name, label):
        function = getattr(Progress, name)
        monkeypatch.setattr(
            Progress,
            name,
            lambda self, what, *rest, **more: seen.append(label(what)) or function(self, what, *rest, **more),
        )

    record("phase", str)
    record("over_runs", lambda count: f"all runs: {count}")
    # slow, and tested elsewhere
    monkeypatch.setattr("equitape.report.inspection_plots.inspection_plots", lambda inspection: [])
    monkeypatch.setattr("equitape.report.inspection.write_page", lambda *arguments, **options: None)
    monkeypatch.setattr("equitape.report.write_report", lambda *arguments: None)
    monkeypatch.setenv("EQUITAPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(home)
    place = [] if words[0] == "check" else ["--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*words, *place])
    assert result.exit_code == 0, result.output
    assert seen == phases
