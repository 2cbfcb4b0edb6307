"""Plugins: user files and modules that register encodings, tasks and other entries.

They are entry points in the group `equitape.plugins`, or are named in the environment variable EQUITAPE_IMPORT or with
`equitape --import`, which extends that variable.
"""

import os
import sys
from importlib import import_module, metadata, util
from pathlib import Path
from types import ModuleType

VARIABLE = "EQUITAPE_IMPORT"
GROUP = "equitape.plugins"
_imported: set[str] = set()


def named_plugins() -> list[str]:
    """The plugins named in the environment variable, separated as in PATH."""
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def installed_plugins() -> list[metadata.EntryPoint]:
    """Plugins of installed packages."""
    return sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name)


def has_plugins() -> bool:
    """Whether there are any plugins."""
    return bool(named_plugins() or installed_plugins())


def add_plugins(names: list[str]) -> None:
    """Add plugins, for this process and its child processes."""
    os.environ[VARIABLE] = os.pathsep.join([*named_plugins(), *names])


def load_plugins() -> None:
    """Import each plugin once. A failing import raises ValueError with one sentence, caused by the original error."""
    for name in named_plugins():
        if not _is_file(name) and not _can_be_imported(name):
            raise ValueError(
                f"Plugin {name!r}, from {VARIABLE} or --import, is neither a Python file nor an installed "
                f"module; give the path of a .py file or the name of a module."
            )
        _load(name, f"Plugin {name!r}")
    for entry in installed_plugins():
        _load(entry.value, f"Plugin {entry.name!r} of an installed package ({entry.value})", entry)


def _load(name: str, what: str, entry: metadata.EntryPoint | None = None) -> None:
    if name in _imported:
        return
    # mark as loaded first, since a plugin may look up names itself
    _imported.add(name)
    try:
        if entry is not None:
            entry.load()
        elif _is_file(name):
            import_file(Path(name))
        else:
            import_module(name)
    except Exception as error:
        _imported.discard(name)
        message = " ".join(str(error).split())
        raise ValueError(f"{what} failed to import: {type(error).__name__}: {message}") from error


def _is_file(name: str) -> bool:
    return name.endswith(".py") and Path(name).is_file()


def _can_be_imported(name: str) -> bool:
    try:
        return all(part.isidentifier() for part in name.split(".")) and util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def import_file(path: Path) -> ModuleType:
    """Import a Python file under a unique module name."""
    # use a different module name: a file may be called random.py
    name = f"{VARIABLE.lower()}_{path.stem}"
    spec = util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
