"""The table of cases covers what is registered."""

from cases import CASES
from equitape import available_encodings


def test_every_registered_encoding_has_a_case():
    assert set(available_encodings()) == {name for name in CASES if "-" not in name}
