"""The table of cases covers what is registered."""

import pytest

from cases import CASES
from equitape import available_encodings
from equitape.encodings import LayerEncoding


def test_every_registered_encoding_has_a_case():
    assert set(available_encodings()) == {name for name in CASES if "-" not in name}


@pytest.mark.parametrize("hook", ["begin", "values"])
def test_hooks_under_their_old_names_are_refused(hook):
    """They would never be called, and the encoding would do without them unnoticed."""
    with pytest.raises(TypeError, match=f"defines the hook '{hook}', which is now called"):
        type("Old", (LayerEncoding,), {hook: lambda self: None})
