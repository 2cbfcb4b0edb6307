"""Files and folders are complete or absent, whatever happens while they are written."""

import json
import math
import os

import pytest

from equitape.runs import files
from equitape.runs.files import (
    files_in,
    make_directory,
    new_folder,
    plain,
    read_json,
    remove_partial,
    write_json,
    write_text,
)


def fail(*_):
    raise OSError(28, "No space left on device")


def test_text_and_json(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": (1, math.nan), 2: math.inf})
    assert json.loads(path.read_text()) == {"x": [1, None], "2": None}
    write_text(path, "größer")
    assert path.read_bytes() == "größer".encode()
    assert [each.name for each in path.parent.iterdir()] == ["b.json"]


def test_an_error_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_json_that_is_damaged_or_absent(tmp_path):
    (tmp_path / "a.json").write_text("{")
    assert read_json(tmp_path / "a.json") is None
    assert read_json(tmp_path / "b.json") is None
    assert read_json(tmp_path) is None


def test_plain_content_is_not_changed():
    content = {"a": [1, "x", None, True, {"b": 0.5}]}
    assert plain(content) == content


def test_a_new_folder_appears_complete(tmp_path):
    with new_folder(tmp_path / "x" / "folder") as folder:
        (folder / "a.txt").write_text("a")
        assert not (tmp_path / "x" / "folder").exists()
    assert (tmp_path / "x" / "folder" / "a.txt").read_text() == "a"
    assert [each.name for each in (tmp_path / "x").iterdir()] == ["folder"]


def test_a_new_folder_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="No space left"), new_folder(tmp_path / "folder") as folder:
        fail((folder / "a.txt").write_text("a"))
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_that_another_process_has_made_meanwhile_is_kept(tmp_path):
    with new_folder(tmp_path / "folder") as folder:
        (folder / "a.txt").write_text("mine")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "a.txt").write_text("theirs")
    assert (tmp_path / "folder" / "a.txt").read_text() == "theirs"
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_files_join_those_of_a_folder_with_descriptions_last(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old.txt").write_text("old")
    moved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: moved.append(b.name) or replace(a, b))
    with files_in(tmp_path / "folder") as folder:
        for name in ("a.json", "b.bin", "c.md"):
            (folder / name).write_text(name)
    assert moved == ["b.bin", "c.md", "a.json"]
    assert sorted(each.name for each in (tmp_path / "folder").iterdir()) == ["a.json", "b.bin", "c.md", "old.txt"]


def test_files_that_cannot_be_written_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "flush_to_disk", fail)
    message = r"Cannot write to .* \(No space left on device\); nothing there was changed"
    with pytest.raises(OSError, match=message), files_in(tmp_path / "folder") as folder:
        (folder / "a.txt").write_text("a")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give the path of a folder"), files_in(tmp_path / "file"):
        pass


def test_remains_of_killed_processes_are_removed(tmp_path):
    (tmp_path / "recipe.yaml.partial").write_text("")
    (tmp_path / ".x.partial").mkdir()
    (tmp_path / ".x.partial" / "a").write_text("")
    (tmp_path / "recipe.yaml").write_text("")
    remove_partial(tmp_path)
    remove_partial(tmp_path / "absent")
    assert [each.name for each in tmp_path.iterdir()] == ["recipe.yaml"]


def test_directories(tmp_path):
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; choose a directory"):
        make_directory(tmp_path / "file")
    with pytest.raises(ValueError, match=r"/file is a file; choose a directory"):
        make_directory(tmp_path / "file" / "inside")
