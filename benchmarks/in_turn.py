"""`equitape bench` for many cases and encodings on one GPU: all compile side by side, each is timed alone.

    python benchmarks/in_turn.py benchmarks/h200.txt --out results --minutes 8 --encoding rope --encoding tape

Compiling takes most of the time of a benchmark and only one core. So every case of every encoding is a process of its
own. A process that is ready to be timed waits for the other encodings of its case; then all other processes are
stopped, and these are timed one after another, RoPE first and again last. Rows are written to OUT/rows.csv as they
come, with ratios to RoPE in the same case.

A line of the file of cases: GPU memory of one process in GiB, then options of `equitape bench`. Earlier lines go first;
what is not done after --minutes is left out.
"""

import argparse
import contextlib
import os
import shlex
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PAUSE = 0.05
SETTLE = 0.5
"""Seconds that kernels of stopped processes have to end."""
LONGEST = 120
"""Seconds after which a process that is timed is given up."""


@dataclass
class Job:
    """One case of one encoding."""

    case: int
    encoding: str
    options: list[str]
    gib: float
    csv: Path
    process: Any = None
    connection: Any = None
    ready: str | None = None
    since: float = 0.0
    ended: bool = False
    times: dict[str, list[float]] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.process is not None and not self.ended

    @property
    def memory(self) -> float:
        """GiB: what it was compared with is gone once it is ready."""
        return self.gib if self.ready is None else self.gib / 2

    def start(self) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(self.encoding, self.options, self.csv, other), daemon=True)
        self.process.start()
        other.close()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def end(self) -> None:
        self.ended, self.ready = True, None
        self.process.kill()
        self.process.join()

    def listen(self) -> None:
        """Note whether the process is ready, or has ended."""
        try:
            if self.connection.poll():
                self.ready, self.since = self.connection.recv(), time.monotonic()
        except (EOFError, OSError):
            self.end()
            return
        if not self.process.is_alive() and not self.connection.poll():
            self.end()

    def timed(self) -> bool:
        """Let the process time its case once; False if it did not."""
        try:
            self.connection.send("time")
            if self.connection.poll(LONGEST):
                self.times.setdefault(self.ready, []).append(self.connection.recv())
                return True
        except (EOFError, OSError):
            pass
        self.end()
        return False


def work(encoding: str, options: list[str], csv: Path, connection: Any) -> None:
    """The process of a job: `equitape bench`, which asks before it times."""
    log = csv.with_suffix(".log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    from equitape.bench import run
    from equitape.cli import app

    time_run = run.time_run

    def ask(prepared: Any, case: Any, *settings: Any) -> Any:
        if "--no-compile" not in options:
            # compiles what a comparison at a smaller size did not
            prepared.before(0)
            prepared.call(0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        connection.send(f"{case.measure} {case.batch} x {case.length}")
        timings = []
        while connection.recv() == "time":
            timings.append(time_run(prepared, case, *settings))
            connection.send(timings[-1].median)
        return timings[0]

    run.time_run = ask
    app(["bench", *options, "--once", "--encoding", encoding, "--csv", str(csv)])


def read_jobs(file: Path, encodings: list[str], out: Path) -> list[Job]:
    jobs = []
    for number, line in enumerate(file.read_text().splitlines()):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        options, own = [], []
        rest = iter(words[1:])
        for word in rest:
            own.append(next(rest)) if word == "--encoding" else options.append(word)
        for index, encoding in enumerate(own or encodings):
            jobs.append(Job(number, encoding, options, float(words[0]), out / f"{number:02}-{index}.csv"))
    return jobs


def next_group(jobs: list[Job], patience: float) -> list[Job]:
    """The jobs to time now: those of a case that wait at the same place, if no other of the case is on its way."""
    for first in jobs:
        if first.ready is None:
            continue
        mates = [job for job in jobs if job.case == first.case and not job.ended]
        waiting = [job for job in mates if job.ready == first.ready]
        late = any(time.monotonic() - job.since > patience for job in waiting)
        # one that failed at this place waits at its next
        if late or all(job.ready is not None for job in mates):
            return waiting
    return []


def time_group(group: list[Job], jobs: list[Job]) -> None:
    others = [job for job in jobs if job.runs and job not in group]
    for job in others:
        job.send_signal(signal.SIGSTOP)
    time.sleep(SETTLE)
    place = group[0].ready
    first = group[0] if group[0].encoding == "rope" else None
    for job in [*group, *([first] if first is not None and len(group) > 1 else [])]:
        if job.runs:
            job.timed()
    for job in group:
        if job.ready is not None:
            job.connection.send("go on")
            job.ready = None
    for job in others:
        job.send_signal(signal.SIGCONT)
    for job in group:
        found = [f"{each:.3f}" for each in job.times.get(place, [])]
        print(f"{shlex.join(job.options)}, {job.encoding}, {place}: {', '.join(found) or 'nothing'} ms", flush=True)


def collect(jobs: list[Job], out: Path) -> None:
    """All rows in one file, each with its ratio to RoPE in the same case."""
    from equitape.bench.rows import append_csv, read_csv

    rows = [(job, row) for job in jobs if job.csv.is_file() for row in read_csv(job.csv)]
    order: dict[Any, int] = {}
    for job, row in rows:
        order.setdefault((job.case, row.group), len(order))
    # what is compared lies together
    rows.sort(key=lambda pair: (pair[0].case, order[pair[0].case, pair[1].group]))
    place, new = out / "rows.csv", out / "rows.new"
    new.unlink(missing_ok=True)
    references = {(job.case, row.group): row.ms_median for job, row in rows if row.encoding == "rope" and row.ms_median}
    for job, row in rows:
        reference = references.get((job.case, row.group))
        row.ratio = row.ms_median / reference if row.ms_median and reference else None
        append_csv(new, row)
    if rows:
        new.replace(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--encoding", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--processes", type=int, default=14, help="at most so many at a time")
    parser.add_argument("--memory", type=float, default=125.0, help="GiB of the GPU")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds that the first of a case waits")
    given = parser.parse_args()
    # processes are stopped by their id, so they must have no children that compile; and each has one core
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    given.out.mkdir(parents=True, exist_ok=True)
    jobs = read_jobs(given.cases, given.encoding, given.out)
    until = time.monotonic() + 60 * given.minutes
    try:
        while time.monotonic() < until and not all(job.ended for job in jobs):
            alive = [job for job in jobs if job.runs]
            for job in jobs:
                if job.process is None:
                    full = sum(each.memory for each in alive) + job.gib > given.memory
                    if len(alive) >= given.processes or (alive and full):
                        break
                    job.start()
                    alive.append(job)
            for job in alive:
                if job.ready is None:
                    job.listen()
            group = next_group(jobs, given.patience)
            if group:
                time_group(group, jobs)
                collect(jobs, given.out)
            else:
                time.sleep(PAUSE)
    finally:
        for job in jobs:
            if job.runs:
                job.end()
        collect(jobs, given.out)
    drifts = [abs(found[-1] / found[0] - 1) for job in jobs for found in job.times.values() if len(found) > 1]
    if drifts:
        print(f"RoPE's second times: {statistics.median(drifts):.1%} off (median), {max(drifts):.1%} (largest)")
    unfinished = sum(not job.csv.is_file() for job in jobs)
    print(f"{len(jobs) - unfinished} of {len(jobs)} processes measured something.")
    sys.exit(unfinished > 0)


if __name__ == "__main__":
    main()
