"""Habits that a machine can watch."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_no_source_file_is_over_400_lines():
    long = {str(path): len(path.read_text().splitlines()) for path in ROOT.glob("src/**/*.py")}
    assert {path: lines for path, lines in long.items() if lines > 400} == {}


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
