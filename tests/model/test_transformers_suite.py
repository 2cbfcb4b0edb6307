"""transformers' own tests of models, on this decoder and on its Llama: this decoder passes what Llama passes.

On request, since they take minutes: EQUITAPE_TRANSFORMERS names the folder of transformers' sources in the installed
version, unpacked from `pip download --no-binary :all: --no-deps transformers` or cloned. The archive has the tests
common to all models; a clone also those of generation and export.
"""

import importlib
import os
import re
import sys
import types
import unittest
from pathlib import Path

import pytest
import torch
import transformers

from equitape import (
    EquitapeConfig,
    EquitapeForCausalLM,
    EquitapeForQuestionAnswering,
    EquitapeForSequenceClassification,
    EquitapeForTokenClassification,
    EquitapeModel,
)

SOURCES = os.environ.get("EQUITAPE_TRANSFORMERS")
PACKAGE = "transformers_tests"
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
OURS = (
    EquitapeModel, EquitapeForCausalLM, EquitapeForSequenceClassification, EquitapeForTokenClassification,
    EquitapeForQuestionAnswering,
)  # fmt: skip
SETS_ROPE_PARAMETERS = (
    "test_model_rope_scaling_frequencies",
    "test_model_rope_scaling_from_config",
    "test_rope_validation",
    "test_rope_scaling",
)
"""Tests that write Llama's `rope_parameters` into the configuration, which has `encoding` instead."""

pytestmark = pytest.mark.skipif(SOURCES is None, reason="EQUITAPE_TRANSFORMERS does not name transformers' sources")


def import_mixins(config):
    """(common tests, tests of generation); empty classes for what the archive lacks."""
    pytest.importorskip("parameterized")
    folder = Path(SOURCES).expanduser() / "tests"
    marks = {name for path in folder.glob("*.py") for name in re.findall(r"\bmark\.(\w+)", path.read_text())}
    for name in sorted(marks):
        config.addinivalue_line("markers", name)
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        if not (folder / f"{name.replace('.', '/')}.py").exists():
            parent = types.ModuleType(f"{PACKAGE}.{name.partition('.')[0]}")
            parent.__path__ = []
            module = types.ModuleType(f"{PACKAGE}.{name}")
            setattr(module, mixin, type(mixin, (), {}))
            sys.modules |= {parent.__name__: parent, module.__name__: module}
    common = importlib.import_module(f"{PACKAGE}.test_modeling_common").ModelTesterMixin
    return common, importlib.import_module(f"{PACKAGE}.generation.test_utils").GenerationTesterMixin


class SmallInputs:
    """Small inputs and configurations, as the mixins expect them."""

    batch_size, seq_length, is_training, num_labels = 3, 7, True, 3
    hidden_size, num_hidden_layers, num_attention_heads = (
        SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )

    def __init__(self, make_config):
        self.get_config = make_config

    def prepare_config_and_inputs(self):
        tokens = torch.randint(3, SIZES["vocab_size"], (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.tril(torch.ones_like(tokens))}

    prepare_config_and_inputs_for_common = prepare_config_and_inputs


def make_case(name, classes, config_class, make_config, mixins):
    """A test case of the mixins on these classes."""

    def set_up(self):
        self.model_tester = SmallInputs(make_config)
        self.config_tester = None

    def prepare(self, inputs, model_class, return_labels=False):
        inputs = {key: value.clone() for key, value in inputs.items()}
        rows = torch.zeros(SmallInputs.batch_size, dtype=torch.long)
        if return_labels:
            # the mixin looks classes up by name in tables of transformers' own models
            if model_class.__name__.endswith("QuestionAnswering"):
                inputs |= {"start_positions": rows, "end_positions": rows}
            elif model_class.__name__.endswith("SequenceClassification"):
                inputs["labels"] = rows
            elif not model_class.__name__.endswith("Model"):
                inputs["labels"] = torch.zeros_like(inputs["input_ids"])
        return inputs

    content = {
        "setUp": set_up,
        "_prepare_for_class": prepare,
        "all_model_classes": classes,
        "config_class": config_class,
    }
    return type(name, (*mixins, unittest.TestCase), content)


def outcomes(case):
    """(reasons of failures, names of skipped tests, number of tests)."""
    suite = unittest.TestLoader().loadTestsFromTestCase(case)
    result = unittest.TestResult()
    suite.run(result)
    name = lambda test: str(getattr(test, "test_case", test)).partition(" ")[0]  # noqa: E731
    failed = {name(test): reason.strip().splitlines()[-1] for test, reason in (*result.failures, *result.errors)}
    return failed, {name(test) for test, _ in result.skipped}, result.testsRun


@pytest.mark.parametrize("encoding", [{"kind": "tape", "init_scale": 0.5}, {"kind": "rope"}], ids=["tape", "rope"])
def test_passes_what_llama_passes(encoding, capsys, pytestconfig):
    mixins = import_mixins(pytestconfig)
    heads = tuple(getattr(transformers, f"Llama{head}") for head in HEADS)
    llama = make_case("Llama", heads, transformers.LlamaConfig, lambda: transformers.LlamaConfig(**SIZES), mixins)
    ours = make_case("Equitape", OURS, EquitapeConfig, lambda: EquitapeConfig(**SIZES, encoding=encoding), mixins)
    llama_failed, llama_skipped, _ = outcomes(llama)
    failed, skipped, count = outcomes(ours)
    with capsys.disabled():
        print(f"\n{count} tests, {len(skipped)} skipped ({len(llama_skipped)} by Llama), {len(failed)} failed")
    assert {
        name: reason
        for name, reason in failed.items()
        if name not in llama_failed and not name.startswith(SETS_ROPE_PARAMETERS)
    } == {}
    assert skipped - llama_skipped - set(failed) == set()
