"""The examples run, in small, and show what their pages say."""

import difflib
import json
import sys
import wave
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """As scripts, they import their neighbours."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == EXAMPLES:
            del sys.modules[name]


def code_lines(name):
    """Lines of a file without its docstring and blank ones."""
    lines = (EXAMPLES / name).read_text().splitlines()
    return [line for line in lines[1:] if line.strip()]


def test_tape_takes_at_most_ten_lines_of_a_foreign_gpt():
    """Changed and new lines; what is only removed is the old attention and the table of positions."""
    marks = list(difflib.ndiff(code_lines("gpt.py"), code_lines("gpt_tape.py")))
    new = [line[2:].strip() for line in marks if line.startswith("+ ")]
    assert 0 < len(new) <= 10
    assert "equitape" not in (EXAMPLES / "gpt.py").read_text().split('"""', 2)[2]
    assert len((EXAMPLES / "gpt.py").read_text().splitlines()) <= 100


def test_the_foreign_gpt_learns_more_with_tape_than_without_positions():
    import train_gpt

    words = "--steps 80 --length 24 --seeds 0 --kinds none tape"
    found = {kind: rows[0]["validation loss"] for kind, rows in train_gpt.main(words.split()).items()}
    assert found["tape"] < found["none"] - 0.05


def test_the_gpt_generates_after_the_change():
    import gpt
    import gpt_tape

    torch.manual_seed(0)
    model = gpt_tape.GPT(gpt.GPTConfig(block_size=16, n_layer=2))
    assert model.generate(torch.zeros(1, 3, dtype=torch.long), 4).shape == (1, 7)


def test_images():
    import images

    words = "--data sklearn --train 600 --test 100 --epochs 6 --layers 1 --width 32 --seeds 0 --kinds learned tape"
    found = images.main(words.split())
    for kind in ("learned", "tape"):
        assert found[kind][0]["28, trained"] > 20
        assert {"20 pixels", "44 pixels", "canvas 56"} <= set(found[kind][0])


def write_tones(folder):
    """Ten recordings per digit: digit d is a tone of (d + 1) x 300 Hz."""
    time = torch.arange(3000) / 8000
    for digit in range(10):
        for index in range(10):
            sound = (torch.sin(2 * torch.pi * 300 * (digit + 1) * (time + index / 1000)) * 20000).to(torch.int16)
            with wave.open(str(folder / f"{digit}_someone_{index}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(8000)
                file.writeframes(sound.numpy().tobytes())


def test_sound(tmp_path):
    import sound

    write_tones(tmp_path)
    out = tmp_path / "sound.json"
    words = f"--data {tmp_path} --epochs 20 --layers 1 --width 32 --seeds 0 --kinds tape --out {out}"
    found = sound.main(words.split())
    assert found["tape"][0]["0.64 s, trained"] > 50
    more = sound.main([*words.split(), "--kinds", "rope", "tape", "--epochs", "1", "--seeds", "1"])
    assert {kind: [row["seed"] for row in rows] for kind, rows in more.items()} == {"tape": [0, 1], "rope": [1]}


def test_masked_language_model():
    import masked_lm

    words = "--steps 60 --length 64 --width 32 --layers 2 --seeds 0 --kinds none tape"
    found = {kind: rows[0]["loss"] for kind, rows in masked_lm.main(words.split()).items()}
    assert found["tape"] < torch.tensor(257.0).log().item()
    assert found["tape"] < found["none"] + 0.05


@pytest.mark.parametrize("name", ["images", "sound", "gpt", "masked-lm"])
def test_tables_of_the_page_are_those_of_the_files(name):
    import results

    folder = EXAMPLES.parent / "docs/results"
    found = json.loads((folder / f"own-model/{name}.json").read_text())["results"]
    assert results.table(found) in (folder / "own-model.md").read_text()
