"""The table of cases covers what is registered, and encodings are whole without a model."""

import pytest
import torch

from cases import CASES, encoding_of, tiny_config
from equitape import available_encodings
from equitape.encodings import LayerEncoding, build_encoding


def test_every_registered_encoding_has_a_case():
    assert set(available_encodings()) == {name for name in CASES if "-" not in name}


@pytest.mark.parametrize("hook", ["begin", "values"])
def test_hooks_under_their_old_names_are_refused(hook):
    """They would never be called, and the encoding would do without them unnoticed."""
    with pytest.raises(TypeError, match=f"defines the hook '{hook}', which was renamed to"):
        type("Old", (LayerEncoding,), {hook: lambda self: None})


@pytest.mark.parametrize("case", CASES)
def test_an_encoding_is_initialised_when_constructed(case, monkeypatch):
    """Every parameter is written before it is read, and the stream that a model draws from does not move."""
    empty = torch.empty

    def poisoned(*sizes, **options):
        return empty(*sizes, **options).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)
    torch.manual_seed(0)
    encoding = build_encoding(encoding_of(case), tiny_config(case).geometry)
    layers = [encoding.layer(index) for index in range(3)]
    for module in (encoding, *layers):
        assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_initialising_an_encoding_leaves_the_random_stream_alone():
    geometry = tiny_config("t5").geometry
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    first = build_encoding(encoding_of("t5"), geometry).table
    assert torch.equal(torch.rand(4), expected)
    second = build_encoding(encoding_of("t5"), geometry).table
    assert first.std() > 0.01
    assert not torch.equal(first, second)
