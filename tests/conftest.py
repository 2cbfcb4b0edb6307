import gc
import logging
import os
import sys
from functools import cache
from pathlib import Path

# tests run side by side on few cores: threads of one would only wait for those of the other
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# as the command line does; tqdm reads it when it is imported
os.environ.setdefault("TQDM_DISABLE", "1")
# some virtual machines announce AMX and then trap on it, in a plain bfloat16 nn.Linear
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path.insert(0, str(Path(__file__).parent))

import pytest

QUICK_CASES = {"rope", "alibi", "tape", "tape2"}
"""Encodings of the quick tests: rotations, a bias, a state, and a state with every part."""


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="of the tests over all encodings, run those of four, not flex; compile no C++ code",
    )


def pytest_configure(config):
    # a process that only hands tests to its workers, which wait for it, needs no torch
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        set_up_libraries()


def set_up_libraries():
    import torch

    torch.set_num_threads(1)
    # before transformers brings Triton in: without a GPU its kernels run under the interpreter
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def pytest_collection_modifyitems(config, items):
    if not config.getoption("quick"):
        return
    from cases import CASES

    # flex_attention is compiled, for half a minute
    skipped = {*CASES, "flex_attention"} - QUICK_CASES

    def is_left_out(item):
        if item.get_closest_marker("inductor"):
            return True
        given = getattr(item, "callspec", None)
        return given is not None and any(isinstance(x, str) and x in skipped for x in given.params.values())

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


frozen_modules = 0


def settle_modules():
    """Trainer and the benchmark collect garbage often: objects of imported modules need not be visited each time."""
    global frozen_modules
    gc.collect()
    gc.freeze()
    frozen_modules = len(sys.modules)
    # pytest puts its handlers on every logger that does not propagate, six times a test: torch has fifty, and with a
    # handler on the logger of its traces the compiler writes all of them
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_runtest_logfinish():
    # the compiler, plots and others are imported by the first test that needs them
    if len(sys.modules) > frozen_modules + 20:
        settle_modules()


def pytest_collection_finish():
    settle_modules()
    # torch.compile logs every assignment with its stack, which takes a quarter of its time; older versions do not
    compiler = sys.modules.get("torch._dynamo.config")
    if hasattr(compiler, "side_effect_replay_policy"):
        compiler.side_effect_replay_policy = "silent"


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # torch.manual_seed would keep its caller's stack for every kind of device, which takes a millisecond
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _asked_once():
    """What stays the same is not asked again for every run and command: the commit, versions and installed plugins.

    Nor do tests wait for the disk: none of them cuts the power.
    """
    from equitape import plugins
    from equitape.runs import environment

    find_plugins = plugins.installed_plugins
    plugins_on = cache(lambda path: find_plugins())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "find_commit", cache(environment.find_commit))
        patch.setattr(environment, "package_version", cache(environment.package_version))
        patch.setattr(plugins, "installed_plugins", lambda: plugins_on(tuple(sys.path)))
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture
def no_drawing(monkeypatch):
    """Placeholders for the pictures of reports, in tests of everything else that a command does."""

    def save(figure, file, format, **options):
        file.write("<svg ></svg>" if format == "svg" else b"\x89PNG")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
    monkeypatch.setattr("matplotlib.figure.Figure.draw_without_rendering", lambda figure: None)
