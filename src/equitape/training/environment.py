"""Where and with what results were made."""

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..version import __version__


def describe_environment() -> dict[str, str | None]:
    """Versions, hardware, commit and time, as results.json has them."""
    return {
        "equitape": __version__,
        "torch": torch.__version__,
        **{name: _version(name) for name in ("transformers", "accelerate")},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "processor": _processor(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def join_environments(environments: list[dict[str, Any]]) -> dict[str, str]:
    """What several runs were made with, as text: the values of a key, each once; of dates the first and the last."""
    joined = {}
    for key in {key: None for environment in environments for key in environment}:
        values = [str(environment.get(key) or "unknown") for environment in environments]
        if key == "date":
            values = [min(values), max(values)]
        joined[key] = ", ".join(dict.fromkeys(values))
    return joined


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit this package is checked out at, "+changes" behind it when its files differ."""

    def git(*arguments: str) -> str | None:
        here = Path(__file__).parent
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    # a package installed into somebody else's repository is not of its commit
    if git("ls-files", "--error-unmatch", __file__) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if git("status", "--porcelain", "--untracked-files=no") else commit
