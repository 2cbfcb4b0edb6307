"""Names of folders made from names that people choose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equitape.runs.folders import file_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tape", "tape"),
        ("tape, no carry", "tape-no-carry"),
        ("a/b", "a-b"),
        ("v1.5_x", "v1.5_x"),
        ("../../x", "..-..-x"),
    ],
)
def test_usual_names(text, name):
    assert file_name(text) == name


def test_names_in_other_scripts_do_not_collide():
    names = {file_name(text) for text in ("тейп", "роуп", "テープ", "é", "è", "-", "")}
    assert len(names) == 7


@given(st.text())
def test_every_name_is_one_part_of_a_path(text):
    name = file_name(text)
    assert name not in ("", ".", "..")
    assert len(name) <= 100
    assert name.isascii()
    assert not set(name) & set("/\\")


def test_long_names_stay_apart():
    assert file_name("x" * 300) != file_name("x" * 301)
