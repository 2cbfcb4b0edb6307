"""Habits that a machine can watch."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_no_source_file_is_over_400_lines():
    long = {str(path): len(path.read_text().splitlines()) for path in ROOT.glob("src/**/*.py")}
    assert {path: lines for path, lines in long.items() if lines > 400} == {}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_modules_of_tests_have_different_names():
    """They are imported by their bare names: pytest does not collect the second of two equal ones."""
    names = Counter(path.name for path in ROOT.glob("tests/**/*.py") if path.name != "conftest.py")
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_no_test_imports_another():
    """What tests share is in modules without tests."""
    imports = {path: set(imported_modules(path)) for path in ROOT.glob("tests/**/*.py")}
    names = {path.stem for path in imports if path.stem.startswith("test_")}
    assert {str(path): used & names for path, used in imports.items() if used & names} == {}


def test_no_test_measures_wall_clock_time():
    """It depends on the machine's load. `time.monotonic` serves deadlines of waiting, never an assertion."""
    found = {}
    for path in ROOT.glob("tests/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            clocks = (
                {"perf_counter", "time"} if not isinstance(node, ast.Assert) else {"perf_counter", "time", "monotonic"}
            )
            for part in ast.walk(node) if isinstance(node, ast.Assert) else [node]:
                called = part.func if isinstance(part, ast.Call) else None
                if isinstance(called, ast.Attribute) and ast.unparse(called) in {f"time.{name}" for name in clocks}:
                    found[str(path)] = part.lineno
    assert found == {}
