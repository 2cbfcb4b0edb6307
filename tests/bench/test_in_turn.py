"""Which processes of benchmarks/in_turn.py are timed next. Processes themselves would take too long here."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[2] / "benchmarks"
ENCODINGS = ["rope", "tape"]


@pytest.fixture
def in_turn(monkeypatch):
    spec = importlib.util.spec_from_file_location("in_turn", PLACE / "in_turn.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "in_turn", module)
    spec.loader.exec_module(module)
    return module


def make_jobs(in_turn, tmp_path, lines):
    cases = tmp_path / "cases.txt"
    cases.write_text(lines)
    return in_turn.read_jobs(cases, ENCODINGS, tmp_path)


def test_cases_of_the_committed_file_can_be_measured(in_turn, tmp_path):
    from equitape.bench.subjects import parse_subject

    jobs = in_turn.read_jobs(PLACE / "h200.txt", ENCODINGS, tmp_path)
    assert {job.encoding for job in jobs} >= {"rope", "tape layers=[0]", "llama"}
    assert len({job.csv for job in jobs}) == len(jobs)
    for job in jobs:
        assert "--encoding" not in job.options
        assert parse_subject(job.encoding).name == job.encoding


def test_a_case_is_timed_when_all_its_encodings_are_ready(in_turn, tmp_path):
    jobs = make_jobs(in_turn, tmp_path, "1 --shape tiny\n# nothing\n2 --shape tiny --encoding rope --encoding llama\n")
    assert [(job.encoding, job.gib) for job in jobs] == [("rope", 1), ("tape", 1), ("rope", 2), ("llama", 2)]
    assert in_turn.next_group(jobs, patience=60) == []
    for job in (jobs[0], jobs[2], jobs[3]):
        job.ready, job.since = "train 2 x 64", time.monotonic()
    assert in_turn.next_group(jobs, patience=60) == jobs[2:]
    jobs[1].ended = True
    assert in_turn.next_group(jobs, patience=60) == jobs[:1]


def test_a_case_does_not_wait_forever(in_turn, tmp_path):
    rope, tape = make_jobs(in_turn, tmp_path, "1 --shape tiny\n")
    rope.ready, rope.since = "prefill 1 x 64", time.monotonic() - 61
    assert in_turn.next_group([rope, tape], patience=60) == [rope]
    # the other failed at this length and is ready at the next
    rope.since = time.monotonic()
    tape.ready, tape.since = "prefill 1 x 128", time.monotonic()
    assert in_turn.next_group([rope, tape], patience=60) == [rope]


def test_rows_to_compare_lie_together_with_their_ratio(in_turn, tmp_path):
    from equitape.bench.rows import Row, append_csv, read_csv

    about = dict.fromkeys(("date", "commit", "gpu", "torch", "transformers", "triton", "dtype", "shape"), "")
    jobs = make_jobs(in_turn, tmp_path, "1 --shape tiny\n")
    for job, times in zip(jobs, ({32: 2.0, 64: 4.0}, {32: 3.0, 64: None}), strict=True):
        for length, ms in times.items():
            row = Row(
                **about, compile=False, workload="train", encoding=job.encoding, batch=1, length=length, ms_median=ms
            )
            append_csv(job.csv, row)
    in_turn.collect(jobs, tmp_path)
    found = [(row.encoding, row.length, row.ratio) for row in read_csv(tmp_path / "rows.csv")]
    assert found == [("rope", 32, 1.0), ("tape", 32, 1.5), ("rope", 64, 1.0), ("tape", 64, None)]
