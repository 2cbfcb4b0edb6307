"""Whether a folder holds the run that is about to be made."""

import pytest

from equitape.runs.identity import check_folder, find_differences


def test_differences_have_dotted_names():
    old = {"name": "a", "train": {"steps": 3, "seed": 0}, "task": {"digits": [1, 2]}, "same": 1}
    new = {"name": "b", "train": {"steps": 4, "rate": 0.1}, "task": {"digits": [1, 3]}, "same": 1, "more": None}
    found = {str(each) for each in find_differences(old, new, ignored=("name", "train.rate"))}
    assert found == {
        "train.steps was 3, now 4",
        "train.seed was 0, now None",
        "task.digits was [1, 2], now [1, 3]",
    }
    assert find_differences(old, {**old, "new": None}) == []
    assert [each.name for each in find_differences({"a": {"b": 1}}, {"a": 3})] == ["a"]


def test_long_differences_are_short_in_messages():
    """A list of encodings with all their options is longer than a screen."""
    options = dict.fromkeys("abcdefgh", "a long value")
    old, same = {"kind": "tape", **options}, {"kind": "rope", **options}
    (each,) = find_differences({"e": [old, same]}, {"e": [{**old, "a": 1}, same]})
    assert (each.name, str(each)) == ("e", "e.0.a was a long value, now 1")
    (each,) = find_differences({"e": [old, same]}, {"e": [old]})
    assert str(each).startswith("e was [{'kind': 'tape', 'a': 'a long value'")
    assert len(str(each)) < 250
    # no jumps of its own, or those of the recipe: find_differences takes a missing setting to be None
    (each,) = find_differences({"e": [{"kind": "rope", "jumps": None}]}, {"e": [{"kind": "rope"}]})
    assert str(each) == "e was [{'kind': 'rope', 'jumps': None}], now [{'kind': 'rope'}]"


def test_differences_are_named_where_they_are():
    old = {"plan": {"adapt": {"growth": 0.05, "rank": 8}, "same": 1}, "data": {"a": 1}}
    new = {"plan": {"adapt": {"rank": 8, "new": None}, "same": 1}, "data": None}

    def names(*ignored):
        return [each.name for each in find_differences(old, new, ignored)]

    assert names() == ["plan.adapt.growth", "data"]
    assert names("plan.adapt", "data") == []
    assert names("plan.adapt.growth") == ["data"]


def check(folder, old=None, resume=False):
    check_folder(folder, "run", "run.json", lambda: find_differences(old or {}, {"a": 1}), resume=resume)


def test_folders(tmp_path):
    check(tmp_path / "absent")
    check(tmp_path)
    (tmp_path / "run.json.partial").write_text("")
    (tmp_path / ".lock").write_text("")
    check(tmp_path)
    (tmp_path / "letter.txt").write_text("")
    with pytest.raises(ValueError, match="is not empty and has no run to continue"):
        check(tmp_path, resume=True)
    with pytest.raises(ValueError, match="is a file; choose a directory"):
        check(tmp_path / "letter.txt")
    (tmp_path / "run.json").write_text("")
    with pytest.raises(ValueError, match=r"already holds a different run \(a was None, now 1\)"):
        check(tmp_path, resume=True)
    with pytest.raises(ValueError, match="already holds this run; continue it with --resume"):
        check(tmp_path, {"a": 1})
    check(tmp_path, {"a": 1}, resume=True)
    with pytest.raises(
        ValueError, match=r"\(b was 1, now None; c was 1, now None; d was 1, now None; e was 1, now None; and 1 more\)"
    ):
        check(tmp_path, {"a": 1, **dict.fromkeys("bcdef", 1)}, resume=True)
