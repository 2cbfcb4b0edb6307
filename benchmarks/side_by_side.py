"""Run many commands on one GPU side by side, for a limited time, and go on later.

    python benchmarks/side_by_side.py commands.txt --out runs/queue --at-once 16 --minutes 9

A line of the file is a command for bash. Earlier lines go first. The file is read again all the time, so lines may be
added while it runs. A command that fails is run once more, so it should continue from what it has (`equitape train
--resume`, `equitape extend --only`). A line that succeeded is not run again: call this with the same --out to go on.
When the minutes are up, running commands are ended and begin again with the next call. --free waits with a new
command until the GPU has so many GiB left.

Small runs share a GPU better under CUDA MPS: start `nvidia-cuda-mps-control -d` first. With CUDA_MPS_CLIENT_PRIORITY=1
in its environment, this queue only uses what another one leaves.

OUT/NUMBER.log has what a command printed, OUT/status.json the exit code, tries and seconds of every command.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

PAUSE = 0.2
MOST_TRIES = 2


@dataclass
class Command:
    """One line of the file, and what became of it."""

    line: str
    number: int
    tries: int = 0
    code: int | None = None
    """Exit code of the last try that ended."""
    seconds: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.code == 0 or self.tries >= MOST_TRIES


class Queue:
    """All commands by their lines, and the processes of those that run."""

    def __init__(self, out: Path):
        self.out, self.status = out, out / "status.json"
        self.commands: dict[str, Command] = {}
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        out.mkdir(parents=True, exist_ok=True)
        if self.status.exists():
            self.commands = {entry["line"]: Command(**entry) for entry in json.loads(self.status.read_text())}

    def read(self, file: Path) -> None:
        """Add the lines of the file that are not there yet."""
        for line in map(str.strip, file.read_text().splitlines()):
            if line and not line.startswith("#"):
                self.commands.setdefault(line, Command(line, len(self.commands)))

    def waiting(self) -> list[Command]:
        """What can be started; first what was not tried yet."""
        found = [each for each in self.commands.values() if not each.is_done and each.line not in self.running]
        return sorted(found, key=lambda command: command.tries)

    def start(self, command: Command) -> None:
        log = (self.out / f"{command.number:03}.log").open("a")
        # a session of its own, so that its children end with it
        process = subprocess.Popen(
            ["bash", "-c", command.line],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.running[command.line] = process, time.monotonic()

    def look(self) -> None:
        """Note the commands that have ended."""
        for line, (process, _) in list(self.running.items()):
            if process.poll() is not None:
                command = self.leave(line)
                command.tries, command.code = command.tries + 1, process.returncode
                print(
                    f"{command.number:03} ended with {command.code} after {command.seconds:.0f} s: {line}", flush=True
                )
                self.save()

    def interrupt(self) -> None:
        """End what still runs; this is not counted as a try."""
        for line, (process, _) in list(self.running.items()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.leave(line)
        self.save()

    def leave(self, line: str) -> Command:
        """The command of a process that is gone."""
        _, began = self.running.pop(line)
        command = self.commands[line]
        command.seconds = round(command.seconds + time.monotonic() - began, 1)
        return command

    def save(self) -> None:
        self.status.write_text(json.dumps([asdict(each) for each in self.commands.values()], indent=1) + "\n")


def free_gib() -> float:
    """Memory of the GPU that is free."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--gap", type=float, default=1.0, help="seconds between two starts")
    parser.add_argument("--free", type=float, help="GiB of the GPU that must be free before a start")
    given = parser.parse_args()
    queue = Queue(given.out)
    until, last = time.monotonic() + 60 * given.minutes, -given.gap
    # commands have sessions of their own, so they would outlive this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while time.monotonic() < until:
            queue.read(given.commands)
            queue.look()
            waiting = queue.waiting()
            if not queue.running and not waiting:
                break
            room = len(queue.running) < given.at_once and time.monotonic() - last >= given.gap
            if waiting and room and (given.free is None or not queue.running or free_gib() >= given.free):
                queue.start(waiting[0])
                last = time.monotonic()
            time.sleep(PAUSE)
    finally:
        queue.interrupt()
    done = sum(command.code == 0 for command in queue.commands.values())
    print(f"{done} of {len(queue.commands)} commands are done.")
    sys.exit(done < len(queue.commands))


if __name__ == "__main__":
    main()
