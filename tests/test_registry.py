import pytest

from equitape.encodings import ENCODINGS
from equitape.registry import Registry, describe_choices


def test_names_are_unique_and_sorted():
    registry = Registry("thing")
    registry.register("b", 2)
    registry.register("a")(1)
    assert list(registry) == ["a", "b"]
    assert len(registry) == 2
    assert "a" in registry
    with pytest.raises(ValueError, match="thing 'a' is already registered"):
        registry.register("a", 3)
    registry.unregister("a")
    assert "a" not in registry


def test_unknown_names_list_near_matches():
    registry = Registry("thing")
    registry.register("rope", 1)
    with pytest.raises(ValueError, match=r"Unknown thing 'rop'. Did you mean 'rope'\? Allowed: rope."):
        registry["rop"]
    with pytest.raises(ValueError, match=r"Unknown thing 'xyz'. Allowed: rope."):
        registry["xyz"]


def test_names_with_commas_are_quoted():
    assert describe_choices("x", ["tape, small", "rope"]) == " Allowed: rope, 'tape, small'."


def test_lazy_entries_are_imported_when_asked_for():
    registry = Registry("thing")
    registry.register("counter", "collections:Counter")
    from collections import Counter

    assert registry["counter"] is Counter


def test_unknown_names_mention_plugins():
    with pytest.raises(ValueError, match="To add your own, set EQUITAPE_IMPORT to its file"):
        ENCODINGS["my_own"]
