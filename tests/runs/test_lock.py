"""One process per run folder."""

import json
import multiprocessing
import os
import socket

import pytest

from equitape.runs import lock
from equitape.runs.lock import LOCK, LockedError, locked

HOST = socket.gethostname()


def hold(folder, ready, end):
    with locked(folder):
        ready.set()
        end.wait()


def in_process(folder):
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    process = context.Process(target=hold, args=(folder, ready, end))
    process.start()
    assert ready.wait(60)
    return process, end


def test_a_second_process_is_refused_with_the_first_ones_pid_and_host(tmp_path):
    process, end = in_process(tmp_path / "run")
    message = rf"Process {process.pid} on {HOST} is working in .*run\. Wait for it to end"
    with pytest.raises(LockedError, match=message), locked(tmp_path / "run"):
        pytest.fail("entered")
    end.set()
    process.join()
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    assert list((tmp_path / "run").iterdir()) == []


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    process, _ = in_process(tmp_path)
    process.kill()
    process.join()
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_has_now_is_not_the_owner(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"pid": os.getpid(), "host": HOST, "started": "1"}))
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps({"pid": 7, "host": "elsewhere", "started": "1"}), "Process 7 on elsewhere is working in"),
        ("", "is locked by an unreadable"),
    ],
)
def test_what_cannot_be_judged_is_refused(content, words, tmp_path):
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(LockedError, match=words), locked(tmp_path):
        pytest.fail("entered")
    assert (tmp_path / LOCK).read_text() == content


def test_the_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt), locked(tmp_path):
        raise KeyboardInterrupt
    with locked(tmp_path):
        pass


def take(folder, count, all_tried):
    try:
        with locked(folder):
            with count.get_lock():
                count.value += 1
            all_tried.wait()
    except LockedError:
        all_tried.wait()


def test_of_several_that_find_a_stale_lock_one_takes_it_over(tmp_path):
    process, _ = in_process(tmp_path)
    process.kill()
    process.join()
    context = multiprocessing.get_context("fork")
    count = context.Value("i", 0)
    all_tried = context.Barrier(8)
    takers = [context.Process(target=take, args=(tmp_path, count, all_tried)) for _ in range(8)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert count.value == 1


def test_without_proc_a_living_process_keeps_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_start_time", lambda pid: None)
    process, end = in_process(tmp_path)
    with pytest.raises(LockedError), locked(tmp_path):
        pytest.fail("entered")
    end.set()
    process.join()
