"""Settings: values checked against annotations, errors in one sentence, help from the definitions."""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import AllowInfNan

from equitape.settings import Ge, Gt, Lt, OrOne, Settings, field_help, list_fields
from equitape.values import Commas, parse_pairs, parse_value, set_value


@dataclass(frozen=True, kw_only=True)
class Inner(Settings):
    """Nested settings."""

    rate: Annotated[float, Gt(0)] = 1.0
    """How fast."""


@dataclass(frozen=True, kw_only=True)
class Outer(Settings):
    """Settings of a test."""

    aliases: ClassVar[dict[str, str]] = {"old_count": "count"}

    count: Annotated[int, Ge(1)] = 1
    """How many."""
    names: tuple[str, ...] = ()
    lengths: Annotated[tuple[Annotated[int, Ge(1)], ...], OrOne] = ()
    pair: tuple[Annotated[float, Ge(0), Lt(1)], Annotated[float, Ge(0), Lt(1)]] = (0.9, 0.95)
    mode: Literal["fast", "slow"] = "fast"
    either: bool | Literal["auto"] = False
    layers: str | tuple[int, ...] = "all"
    limit: Annotated[float, AllowInfNan(True)] = math.inf
    place: Path | None = None
    free: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    """What is inside."""

    def __post_init__(self) -> None:
        if self.mode == "slow" and self.count > 10:
            raise ValueError("slow is for 10 or fewer.")


def test_values_become_what_their_annotations_want():
    made = Outer.parse(
        {"count": 1e3, "names": ["a"], "pair": [0, 0.5], "layers": [1], "place": "x", "inner": {"rate": 2}}, "Test"
    )
    assert made == Outer(count=1000, names=("a",), pair=(0.0, 0.5), layers=(1,), place=Path("x"), inner=Inner(rate=2.0))
    assert (type(made.count), type(made.inner.rate), type(made.pair[0])) == (int, float, float)
    assert Outer(pair=[0, 0.5]).pair == (0.0, 0.5)
    assert Outer(limit=math.inf).limit == math.inf


@pytest.mark.parametrize("given", [64, 64.0, [64], (64,)])
def test_a_marked_list_may_be_given_as_its_only_value(given):
    assert Outer.parse({"lengths": given}, "Test").lengths == Outer(lengths=given).lengths == (64,)


WRONG = [
    ({"lengths": 0}, "Task 'test': lengths is 0; it must be a list, for example [1, 2], each a whole number of 1 or"),
    ({"lengths": True}, "Task 'test': lengths is True; it must be a list, for example [1, 2]"),
    ({"lengths": "64"}, "Task 'test': lengths is '64'; it must be a list, for example [1, 2]"),
    ({"names": "a"}, "Task 'test': names is 'a'; it must be a list, for example [a, b], each text."),
    ({"count": 0}, "Task 'test': count is 0; it must be a whole number of 1 or more."),
    ({"count": True}, "Task 'test': count is True; it must be a whole number of 1 or more."),
    ({"count": 1.5}, "Task 'test': count is 1.5; it must be a whole number of 1 or more."),
    ({"names": ["a", 1]}, "Task 'test': names is ['a', 1]; it must be a list, for example [a, b], each text."),
    ({"names": {"a"}}, "Task 'test': names is {'a'}; it must be a list, for example [a, b], each text."),
    ({"pair": [0.5]}, "Task 'test': pair is [0.5]; it must be a list of 2, each a number from 0 to below 1."),
    ({"pair": [0.5, 1]}, "Task 'test': pair is [0.5, 1]; it must be a list of 2, each a number from 0 to below 1."),
    ({"mode": "fats"}, "Task 'test': mode is 'fats'; it must be one of 'fast', 'slow'. Did you mean 'fast'?"),
    ({"either": "yes"}, "Task 'test': either is 'yes'; it must be true or false or 'auto'."),
    ({"inner": {"rate": math.nan}}, "Task 'test': inner.rate is nan; it must be a finite number above 0."),
    ({"inner": {"rate": math.inf}}, "Task 'test': inner.rate is inf; it must be a finite number above 0."),
    ({"inner": {"rat": 1}}, "Task 'test': inner has no option 'rat'. Did you mean 'rate'? Allowed: rate."),
    ({"inner": 3}, "Task 'test': inner is 3; it must be a dictionary of settings."),
    ({"place": 3}, "Task 'test': place is 3; it must be a path, or null."),
    ({"cuont": 3}, "Task 'test' has no option 'cuont'. Did you mean 'count'?"),
    ({"mode": "slow", "count": 11}, "slow is for 10 or fewer."),
    ({"old_count": 2, "count": 3}, "Task 'test': count is set twice"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message for _, message in WRONG])
def test_refusals_are_one_sentence(given, message):
    with pytest.raises(ValueError, match=r"\w") as caught:
        Outer.parse(given, "Task 'test'")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_constructor_checks_too():
    with pytest.raises(ValueError, match=r"^rate is nan; it must be a finite number above 0\.$"):
        Inner(rate=math.nan)

    @dataclass(frozen=True, kw_only=True)
    class Further(Outer):
        more: int = 1

    with pytest.raises(ValueError, match="count is 0"):
        Further(count=0)
    with pytest.raises(ValueError, match="slow is for 10"):
        Further(mode="slow", count=11)


def test_settings_without_default_are_named():
    @dataclass(frozen=True, kw_only=True)
    class Needs(Settings):
        this: int

    with pytest.raises(ValueError, match=r"^Test needs this\.$"):
        Needs.parse({}, "Test")


def test_old_names_work_with_one_note(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert Outer.parse({"old_count": 4}, "A test of names").count == 4
    assert [record.getMessage() for record in caplog.records] == [
        "A test of names: old_count is now called count; the old name still works."
    ]


def test_help_and_defaults_come_from_the_definition():
    assert field_help(Outer)["count"] == "How many."
    rows = {row.name: (row.default, row.help) for row in list_fields(Outer)}
    assert rows["count"] == ("1", "How many.")
    assert rows["pair"] == ("0.9, 0.95", "")
    assert rows["inner"] == ("", "What is inside.")
    assert rows["inner.rate"] == ("1.0", "How fast.")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e6", 1e6),
        ("-2.5E-3", -2.5e-3),
        ("3", 3),
        ("true", True),
        ("rope,tape", ["rope", "tape"]),
        ("[rope,tape]", ["rope", "tape"]),
        ("1024,8192", [1024, 8192]),
        ("3,", [3]),
        ("{a: 1, b: [2, 3]}", {"a": 1, "b": [2, 3]}),
        ("two words, one comma", "two words, one comma"),
        ('"a,b"', "a,b"),
        ("", None),
    ],
)
def test_values_from_the_command_line(text, value):
    assert parse_value(text, "It") == value


def test_commas_stay_text_where_text_is_wanted():
    @dataclass(frozen=True, kw_only=True)
    class Named(Settings):
        title: str = ""
        count: int = 0

    assert Named.parse({"title": parse_value("a,b", "It")}, "Test").title == "a,b"
    with pytest.raises(ValueError, match=r"Test.count is .1,000'; it must be a whole number\."):
        Named.parse({"count": parse_value("1,000", "It")}, "Test")
    assert Outer.parse({"layers": parse_value("1,2", "It"), "names": Commas("a,b", ["a", "b"])}, "T").layers == (1, 2)


def test_pairs_and_paths():
    assert parse_pairs(["theta=1e6", "layers=0,1"], "--tape", "x=1") == {"theta": 1e6, "layers": [0, 1]}
    for wrong, message in (
        (["theta"], "Cannot parse 'theta'; write key=value, for example --tape x=1."),
        (["theta="], "--tape theta= has no value"),
        (["a=1", "a=2"], "--tape sets 'a' twice"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_pairs(wrong, "--tape", "x=1")
    content: dict[str, Any] = {"train": {"steps": 1}}
    set_value(content, "train.betas=0,0.95")
    set_value(content, "task.name=copy")
    assert content == {"train": {"steps": 1, "betas": [0, 0.95]}, "task": {"name": "copy"}}
