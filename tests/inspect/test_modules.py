"""Modules built from equitape.nn through `check` and `inspect`."""

import json

import pytest
import torch
from torch import nn

from cases import gap, randomise
from command_line import call, invoke
from equitape.inspect import certify, inspect_model, visit_layers
from equitape.nn import Attention, grid_ids, make_encoding


class Patches(nn.Module):
    """A vision transformer of two layers that classifies nothing: [1, N, 6] -> [1, N, 16]."""

    def __init__(self, kind="tape", causal=False, axes=2):
        super().__init__()
        self.axes = axes
        self.embed = nn.Linear(6, 16)
        encoding = make_encoding(kind, 16, 2, 3, num_axes=axes)
        self.layers = nn.ModuleList(Attention(16, 2, encoding, layer=index, causal=causal) for index in range(2))

    def sample(self, num_tokens, generator):
        ids = torch.arange(num_tokens) if self.axes == 1 else grid_ids(3, num_tokens // 3)
        return torch.randn(2, len(ids), 6, generator=generator).to(self.embed.weight), ids

    def forward(self, inputs, positions):
        x, state = self.embed(inputs), None
        for layer in self.layers:
            y, state = layer(x, state, positions=positions)
            x = x + y
        return x


class Corner(Patches):
    """Looks at absolute positions, which it does not declare."""

    def forward(self, inputs, positions):
        return super().forward(inputs + 0.1 * positions.sum(-1, keepdim=True).sin(), positions)


def build(make=Patches, **options):
    torch.manual_seed(0)
    model = make(**options)
    randomise(model)
    return model.double()


def verdicts(model):
    found = certify(model, 12)
    return {check.name: check.verdict for check in found.checks}, found


def test_an_equivariant_module_passes():
    found, certificate = verdicts(build())
    assert found == {"shift": "pass", "rotation": "pass", "causality": "does not apply"}
    assert "along any of 2 axes" in certificate.checks[0].meaning
    assert certificate.passed
    assert certificate.notes == []
    assert certificate.checks[0].error < 1e-8


def test_absolute_positions_are_found():
    assert verdicts(build(Corner))[0]["shift"] == "fail"


def test_a_state_that_shifts_do_not_rotate_is_found():
    model = build()
    part = model.layers[0].encoding
    part.update = lambda state, *rest: state + 0.3
    assert verdicts(model)[0]["rotation"] == "fail"


@pytest.mark.parametrize(("hides", "verdict"), [(True, "pass"), (False, "fail")])
def test_causality_of_a_module(hides, verdict):
    model = build(kind="rope", causal=True, axes=1)
    if not hides:
        # still declared causal
        model.layers[0].causal = False
    assert verdicts(model)[0]["causality"] == verdict


def test_an_untrained_module_says_so():
    torch.manual_seed(0)
    assert "this is still a RoPE model" in certify(Patches().double(), 12).notes[0]


def test_records_are_the_modules_own():
    model = build()
    inputs, ids = model.sample(12, torch.Generator().manual_seed(0))
    records = []
    visit_layers(model, inputs[:1], lambda index, record: records.append(record), ids)
    first = model.layers[0]
    x = model.embed(inputs[:1])
    _, state = first(x, positions=ids)
    assert gap(records[0].state, first.initial_state(ids[None], torch.float64).expand(1, 2, -1, -1)[0]) == 0
    assert gap(records[1].state, state[0]) < 1e-12
    assert gap(records[0].attention.sum(-1), torch.ones(2, 12)) < 1e-12
    assert records[0].mixing.shape == (12, 2, 2)
    assert first.implementation == "sdpa"
    assert "attend" not in vars(first)


def test_inspection_of_a_module_shows_both_directions():
    model = build()
    inputs, ids = model.sample(12, torch.Generator().manual_seed(0))
    found = inspect_model(model, inputs[:1], position_ids=ids)
    assert found.labels[5] == "1,1"
    assert not found.causal
    assert found.attention.shape == (2, 2, 12, 12)
    assert not (found.past_only(found.attention) != found.attention).any()
    assert found.distances is None
    assert found.displacement is not None


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A user's file that makes a module."""
    path = tmp_path / "own.py"
    path.write_text("def make():\n    return holder.made\n\nnothing = [].copy\n")
    import equitape.inspect.load as load

    real = load.import_file

    def import_and_fill(given):
        module = real(given)
        module.holder = type("Holder", (), {"made": build()})
        return module

    monkeypatch.setattr(load, "import_file", import_and_fill)
    return path


def test_the_commands_take_a_file_and_a_name(file, tmp_path):
    checked = call("check", f"{file}:make", "--json")
    assert json.loads(checked.stdout)["encoding"] == "tape"
    call("inspect", f"{file}:make", "--max-tokens", "12", "--out", tmp_path / "out")
    assert "12 tokens" in json.loads((tmp_path / "out/inspect.json").read_text())["facts"]["input"]
    assert (tmp_path / "out/inspect.html").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other.py:make", "There is no file"),
        ("own.py:absent", "defines no 'absent'"),
        ("own.py:nothing", "it must be a module built from equitape.nn"),
    ],
)
def test_what_is_not_such_a_module_is_refused(file, name, message):
    assert message in invoke("check", file.parent / name, code=2)
