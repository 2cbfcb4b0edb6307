"""Certificates: every encoding keeps its promises, and every broken promise is found."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cases import CASES, build
from equitape.inspect import certify


def verdicts(certificate):
    return {check.name: check.verdict for check in certificate.checks}


@pytest.mark.parametrize("case", CASES)
def test_every_encoding_passes(case):
    model = build(case, max_position_embeddings=64)
    certificate = certify(model, num_tokens=16)
    assert certificate.passed
    found, encoding = verdicts(certificate), model.model.encoding
    assert list(found) == ["shift", "rotation", "causality", "cache", "padding"]
    assert (found["shift"] == "pass") == encoding.shift_invariant
    assert found["causality"] == "pass"
    assert (found["cache"] == "pass") == (encoding.cache_refusal is None)
    for check in certificate.checks:
        if check.verdict == "pass":
            assert check.error < 1e-8
        if check.verdict == "not promised":
            # the declaration must not hide what holds after all
            assert check.error > 1e-2
            assert "declaration" in check.note


def test_rotation_applies_where_there_are_phasors():
    applies = {
        case: verdicts(certify(build(case), 12))["rotation"] for case in ("tape", "rope", "tensor_tape", "alibi")
    }
    assert applies == {"tape": "pass", "rope": "pass", "tensor_tape": "pass", "alibi": "does not apply"}
    assert verdicts(certify(build("tensor_tape-components"), 12))["rotation"] == "not promised"


def broken(case, hook, wrap, part="layers"):
    """A model one of whose hooks does something it must not."""
    model = build(case)
    owners = (
        [model.model.encoding] if part == "encoding" else [block.self_attn.encoding for block in model.model.layers]
    )
    for owner in owners:
        setattr(owner, hook, wrap(getattr(owner, hook)))
    return verdicts(certify(model, num_tokens=16))


def test_an_update_that_prefers_a_direction_is_found():
    def wrap(update):
        return lambda state, *rest: update(state, *rest) + 0.3

    found = broken("tape", "update", wrap)
    assert (found["shift"], found["rotation"]) == ("fail", "fail")
    assert (found["causality"], found["cache"], found["padding"]) == ("pass", "pass", "pass")


def test_an_update_that_reads_the_future_is_found():
    def wrap(update):
        return lambda state, *rest: update(state, *rest) + 0.3 * state.mean(2, keepdim=True)

    found = broken("tape", "update", wrap)
    assert (found["causality"], found["cache"], found["padding"]) == ("fail", "fail", "fail")
    assert (found["shift"], found["rotation"]) == ("pass", "pass")


def test_ids_that_start_anew_in_every_call_are_found():
    def wrap(begin):
        return lambda positions, dtype: begin(positions._replace(ids=positions.ids - positions.ids[:, :1]), dtype)

    found = broken("rope", "begin", wrap, "encoding")
    assert found["cache"] == "fail"
    assert (found["shift"], found["causality"]) == ("pass", "pass")


def test_padding_that_is_counted_is_found():
    def wrap(begin):
        def counted(positions, dtype):
            index = torch.arange(positions.ids.shape[1])[None]
            ids = positions.ids if positions.valid is None else index
            return begin(positions._replace(ids=ids * (1 + (positions.valid is not None))), dtype)

        return counted

    found = broken("tape", "begin", wrap, "encoding")
    assert found["padding"] == "fail"
    assert all(found[name] == "pass" for name in ("shift", "rotation", "causality", "cache"))


def test_numbers_that_are_none_fail():
    model = build("tape")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    certificate = certify(model, 12)
    assert not certificate.passed
    assert all(check.error == float("inf") for check in certificate.checks if check.verdict == "fail")
    assert "fail" in verdicts(certificate).values()


def test_notes_tell_when_a_certificate_says_little():
    model = build("tape")
    assert certify(model, 12).notes == []
    for name, parameter in model.named_parameters():
        if name.endswith((".carry", ".mix_out")):
            torch.nn.init.zeros_(parameter)
    assert "update of the state is zero" in certify(model, 12).notes[0]
    torch.nn.init.zeros_(model.lm_head.weight)
    assert "All logits are equal" in certify(model, 12).notes[0]


def test_models_of_other_classes():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=41, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    certificate = certify(model, 12)
    assert certificate.passed
    found = verdicts(certificate)
    assert (found["shift"], found["rotation"]) == ("not promised", "does not apply")
    assert (found["causality"], found["cache"], found["padding"]) == ("pass", "pass", "pass")
    assert certificate.encoding == "unknown"


def test_single_precision_and_refusals():
    certificate = certify(build("tape", dtype=torch.float32), 12)
    assert certificate.passed
    assert certificate.limit == 1e-2
    with pytest.raises(ValueError, match="bfloat16, which rounds too much"):
        certify(build("tape", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="num_tokens is 4"):
        certify(build("tape"), 4)


def test_the_model_is_left_as_it_was():
    model = build("tape").train()
    certify(model, 12)
    assert model.training
    assert "begin" not in vars(model.model.encoding)
