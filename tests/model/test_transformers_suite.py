"""transformers' own tests of models, on this decoder and on its Llama: this decoder passes what Llama passes.

On request, since they take minutes: EQUITAPE_TRANSFORMERS names the folder of transformers' sources in the installed
version, unpacked from `pip download --no-binary :all: --no-deps transformers` or cloned. The archive has the tests
common to all models; a clone also those of generation and export.
"""

import functools
import importlib
import os
import sys
import types
import unittest
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

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
TABLES = {
    "MODEL": "EquitapeModel",
    "MODEL_FOR_CAUSAL_LM": "EquitapeForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": "EquitapeForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION": "EquitapeForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING": "EquitapeForQuestionAnswering",
}
"""The tests look classes up by name in tables of transformers' own models."""
SETS_ROPE_PARAMETERS = (
    "test_model_rope_scaling_frequencies",
    "test_model_rope_scaling_from_config",
    "test_rope_validation",
    "test_rope_scaling",
)
"""Tests that write Llama's `rope_parameters` into the configuration, which has `encoding` instead."""

pytestmark = pytest.mark.skipif(SOURCES is None, reason="EQUITAPE_TRANSFORMERS does not name transformers' sources")


@functools.cache
def import_mixins():
    """(common tests, tests of generation); empty classes for what the archive lacks."""
    pytest.importorskip("parameterized")
    folder = Path(SOURCES).expanduser() / "tests"
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

    content = {
        # as for models that are new in transformers
        "test_can_init_all_missing_weights_before_2023": True,
        "setUp": set_up,
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


@functools.cache
def llama_outcomes(mixins):
    heads = tuple(getattr(transformers, f"Llama{head}") for head in HEADS)
    return outcomes(
        make_case("Llama", heads, transformers.LlamaConfig, lambda: transformers.LlamaConfig(**SIZES), mixins)
    )


def describe(failed, skipped, count):
    return f"{count - len(failed) - len(skipped)} passed, {len(failed)} failed, {len(skipped)} skipped"


@pytest.mark.parametrize(
    "encoding",
    [{"kind": "tape", "init_scale": 0.5}, {"kind": "tape2", "init_scale": 0.5}, {"kind": "rope"}],
    ids=["tape", "tape2", "rope"],
)
def test_passes_what_llama_passes(encoding, capsys, monkeypatch):
    # unknown marks are errors here, and transformers has its own
    monkeypatch.setattr(pytest.mark, "_config", None)
    # some read the log
    transformers.logging.set_verbosity_warning()
    for table, name in TABLES.items():
        monkeypatch.setitem(getattr(modeling_auto, f"{table}_MAPPING_NAMES"), EquitapeConfig.model_type, name)
    mixins = import_mixins()
    ours = make_case("Equitape", OURS, EquitapeConfig, lambda: EquitapeConfig(**SIZES, encoding=encoding), mixins)
    llama_failed, llama_skipped, llama_count = llama_outcomes(mixins)
    failed, skipped, count = outcomes(ours)
    transformers.logging.set_verbosity_error()
    unlike_llama = {name: reason for name, reason in failed.items() if name not in llama_failed}
    unlike_llama |= dict.fromkeys(skipped - llama_skipped - set(failed), "skipped")
    with capsys.disabled():
        print(f"\n{encoding['kind']}: {describe(failed, skipped, count)}; beside Llama's: {unlike_llama or 'none'}")
        print(f"Llama: {describe(llama_failed, llama_skipped, llama_count)}; {llama_failed or 'no failure'}")
    assert {name: why for name, why in unlike_llama.items() if not name.startswith(SETS_ROPE_PARAMETERS)} == {}
