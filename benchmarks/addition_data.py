"""How fast sums are made on one CPU core: the examples alone, and with cutting and padding as a data loader does it.

    python benchmarks/addition_data.py

Time is that of the process, so that what else runs on the machine does not count.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch

from equitape.tasks import build_task


def rate(make: Callable[[], int], seconds: float, repeats: int) -> float:
    """Examples per second: the median of several measurements."""
    make()
    rates = []
    for _ in range(repeats):
        started, made = time.process_time(), 0
        while time.process_time() - started < seconds:
            made += make()
        rates.append(made / (time.process_time() - started))
    return statistics.median(rates)


def measure(digits: int, batch_size: int, seconds: float, repeats: int) -> dict[str, float]:
    task = build_task("addition", {"trained_digits": digits, "tested_digits": 2 * digits})
    generator = torch.Generator().manual_seed(0)
    examples = task.training_set(seed=0)
    place = 0

    def draw(count: int) -> int:
        return len(task.make_block(count, generator)["labels"])

    def batch() -> int:
        nonlocal place
        task.collate([examples[place + row] for row in range(batch_size)])
        place += batch_size
        return batch_size

    return {
        "digits": digits,
        "blocks of 256": rate(lambda: draw(256), seconds, repeats),
        "blocks of 2048": rate(lambda: draw(2048), seconds, repeats),
        f"batches of {batch_size}": rate(batch, seconds, repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(digits, arguments.batch_size, arguments.seconds, arguments.repeats) for digits in (3, 20, 40)]
    about = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps({"examples per second, one core": rows, **about}, indent=2))


if __name__ == "__main__":
    main()
