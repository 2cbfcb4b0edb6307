"""Start-up: what commands import before they work, and what `import equitape` does for transformers."""

import json
import subprocess
import sys

import pytest

from equitape.commands import listing


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


AS_COMMAND = "import sys; sys.argv = ['equitape']; "
HEAVY = "sorted({'torch', 'transformers', 'accelerate', 'peft', 'matplotlib', 'numpy'} & set(sys.modules))"


def test_help_and_lists_import_nothing_heavy():
    code = AS_COMMAND + (
        "from typer.testing import CliRunner; from equitape.cli import app; runner = CliRunner(); "
        "names = [c.name or c.callback.__name__ for c in app.registered_commands]; "
        "calls = [['--help'], ['--version'], *([n, '--help'] for n in names), ['encodings'], ['tasks'], ['recipes']]; "
        "codes = [runner.invoke(app, call).exit_code for call in calls]; "
        f"import json, os; bars = 'tqdm' in sys.modules or os.environ['TQDM_DISABLE'] != '1'; "
        f"print(json.dumps([len(names), sorted(set(codes)), {HEAVY}, bars]))"
    )
    number, codes, heavy, bars = json.loads(run(code))
    assert number >= 13
    assert codes == [0]
    assert heavy == []
    # commands show their own progress, and tqdm reads its variable when it is imported
    assert not bars


def test_the_lists_say_what_the_code_says():
    assert listing.FILE.read_text() == listing.as_text(), "regenerate it: python -m equitape.commands.listing"


IMPORTS = f"""
import json, sys, time
sys.argv = ["equitape"]
import equitape
found = {{"early": {HEAVY}}}
import torch, transformers, transformers.modeling_utils, transformers.generation
there, start = "triton" in sys.modules, time.process_time()
found["config"] = equitape.EquitapeConfig.model_type
found["seconds"] = time.process_time() - start
found["unchanged"] = there == ("triton" in sys.modules)
found["registered"] = transformers.AutoConfig.for_model("equitape").model_type
found["functions"] = callable(equitape.adapt) and "tape" in equitape.available_encodings()
sys.argv = ["other"]
del sys.modules["equitape"]
import equitape
found["missing at once"] = sorted(set(equitape.__all__) - set(vars(equitape)))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported():
    """What a process finds that imports equitape as its commands do, then torch and transformers, which take most of
    the time, then the names of equitape, and at last equitape as other programs do.
    """
    return json.loads(run(IMPORTS))


def test_import_is_quick(imported):
    """Under 3 seconds of CPU time beyond torch and transformers, and nothing of Triton that they do not bring."""
    assert imported["seconds"] < 3.0
    assert imported["unchanged"]


def test_names_are_there_in_commands_too(imported):
    assert imported["early"] == []
    assert imported["config"] == "equitape"
    assert imported["functions"]


def test_import_registers_the_model_with_transformers(imported):
    """With the model, which other programs get at once."""
    assert imported["registered"] == "equitape"
    assert imported["missing at once"] == []


def test_names_that_are_not_there():
    import equitape

    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        equitape.nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from equitape.adapt import nothing  # noqa: F401
