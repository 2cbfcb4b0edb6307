"""Every command that works for long names what it is doing."""

import pytest

from command_line import call
from equitape.runs.progress import Progress

LOADING, RUN = "loading the model", ["loading the model", "training", "scoring"]


@pytest.mark.parametrize(
    ("words", "phases"),
    [
        (["train", "small.yaml", "train.steps=1"], ["reading the data", *RUN]),
        (["compare", "small.yaml", "encodings=[rope,nope]", "train.steps=1"], ["reading the data", "all runs: 2", *RUN, *RUN]),
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
def test_phases(words, phases, small_files, tmp_path, monkeypatch):
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
    monkeypatch.chdir(small_files)
    place = [] if words[0] == "check" else ["--out", str(tmp_path / "out")]
    call(*words, *place)
    assert seen == phases
