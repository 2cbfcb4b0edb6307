"""Habits that a machine can watch."""

import ast
import subprocess
import sys
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


def test_import_is_quick():
    """Under 3 seconds of CPU time beyond torch and transformers, and nothing of Triton that they do not bring."""
    code = (
        "import torch, transformers, transformers.modeling_utils, transformers.generation, sys, time; "
        "there = 'triton' in sys.modules; start = time.process_time(); import equitape; "
        "print(time.process_time() - start, there == ('triton' in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, unchanged = result.stdout.split()
    assert float(seconds) < 3.0
    assert unchanged == "True"
