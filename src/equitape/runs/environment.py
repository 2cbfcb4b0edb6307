"""The environment of a result: versions, hardware, commit, time and peak memory."""

import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..version import __version__


def describe_environment() -> dict[str, str | None]:
    """Versions, hardware, commit and time, as stored in run.json and report.json."""
    return {
        "equitape": __version__,
        "torch": torch.__version__,
        **{name: package_version(name) for name in ("transformers", "accelerate")},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "processor": _processor(),
        "commit": find_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_versions(*packages: str) -> dict[str, str]:
    """Versions of equitape, Python and the given packages, if installed."""
    found = {package: package_version(package) for package in packages}
    return {
        "equitape": __version__,
        "python": platform.python_version(),
        **{package: number for package, number in found.items() if number is not None},
    }


def join_environments(environments: list[dict[str, Any]]) -> dict[str, str]:
    """The environments of several runs as text: each distinct value once, and the first and last date."""
    joined = {}
    for key in {key: None for environment in environments for key in environment}:
        values = [str(environment.get(key) or "unknown") for environment in environments]
        if key == "date":
            values = [min(values), max(values)]
        joined[key] = ", ".join(dict.fromkeys(values))
    return joined


def package_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_commit() -> str | None:
    """The commit of the checkout that holds this package, plus "+changes" if files differ; None without a checkout."""
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str | None:
        try:
            found = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return found.stdout.strip() if found.returncode == 0 else None

    # do not report the commit of another project's repository that contains this installation
    if git("ls-files", "--error-unmatch", "version.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if git("status", "--porcelain", "--untracked-files=no") else commit


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def reset_peak() -> None:
    """Reset the peak, if the system allows it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    # without Linux or permission, the peak counts from the start of the process
    with suppress(OSError):
        CLEAR.write_text(RESET_PEAK)


def peak_mib() -> float | None:
    """Peak memory in MiB since the reset; None if the system does not report it."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return kibibytes[0] / 1024 if kibibytes else None
