"""Certificates: every encoding keeps its promises, and every broken promise is found."""

import statistics

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from cases import CASES, build
from equitape.inspect import certify
from equitape.inspect.certificate import Checker


def verdicts(certificate):
    return {check.name: check.verdict for check in certificate.checks}


@pytest.mark.parametrize("case", CASES)
def test_every_encoding_passes(case):
    model = build(case, max_position_embeddings=64)
    certificate = certify(model, num_tokens=16)
    assert certificate.passed
    found, encoding = verdicts(certificate), model.model.encoding
    assert list(found) == ["shift", "rotation", "causality", "cache", "padding", "packing"]
    assert (found["shift"] == "pass") == encoding.shift_invariant
    assert found["causality"] == "pass"
    assert (found["cache"] == "pass") == (encoding.cache_refusal is None)
    for check in certificate.checks:
        if check.verdict == "pass":
            assert check.error < 1e-8
        if check.verdict == "not promised":
            # the declaration must not hide what holds after all
            assert check.error > 1e-2
            assert "not declared" in check.note.lower()


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
    def wrap(initial_state):
        return lambda positions, dtype: initial_state(
            positions._replace(ids=positions.ids - positions.ids[:, :1]), dtype
        )

    found = broken("rope", "initial_state", wrap, "encoding")
    assert found["cache"] == "fail"
    assert (found["shift"], found["causality"]) == ("pass", "pass")


def test_padding_that_is_counted_is_found():
    def wrap(initial_state):
        def counted(positions, dtype):
            index = torch.arange(positions.ids.shape[1])[None]
            ids = positions.ids if positions.valid is None else index
            return initial_state(positions._replace(ids=ids * (1 + (positions.valid is not None))), dtype)

        return counted

    found = broken("tape", "initial_state", wrap, "encoding")
    assert found["padding"] == "fail"
    assert all(found[name] == "pass" for name in ("shift", "rotation", "causality", "cache"))


def test_states_that_depend_on_the_length_of_the_text_are_found():
    """Texts of one length do not show it: other tokens later on change nothing."""

    def wrap(initial_state):
        return lambda positions, dtype: initial_state(positions, dtype) * (1 + 0.1 * positions.ids.shape[1])

    found = broken("rope", "initial_state", wrap, "encoding")
    assert (found["causality"], found["cache"], found["padding"]) == ("fail", "fail", "fail")
    assert (found["shift"], found["rotation"]) == ("pass", "pass")


def test_packed_texts_that_differ_from_those_alone_are_found():
    def wrap(initial_state):
        def stretched(positions, dtype):
            later = 0 if positions.segments is None else positions.segments
            return initial_state(positions._replace(ids=positions.ids * (1 + later)), dtype)

        return stretched

    found = broken("tape", "initial_state", wrap, "encoding")
    assert found["packing"] == "fail"
    assert all(found[name] == "pass" for name in ("shift", "rotation", "causality", "cache", "padding"))


def test_a_move_alone_is_an_update():
    """Zero at the start, it leaves a RoPE model; trained, it does not."""
    model = build("tape", {"move": True, "attention_update": False, "mlp_update": False})
    assert certify(model, num_tokens=16).notes == []
    with torch.no_grad():
        for block in model.model.layers[:-1]:
            block.self_attn.encoding.move_gain.zero_()
    assert "still a RoPE model" in certify(model, num_tokens=16).notes[0]


def test_padding_that_other_rows_feel_is_found():
    """The padded row itself is as it should be."""

    def wrap(initial_state):
        def leaking(positions, dtype):
            state = initial_state(positions, dtype)
            if positions.valid is None:
                return state
            padding = (~positions.valid).sum(1)
            return state * (1 + 0.1 * (padding.sum() - padding))[:, None, None, None]

        return leaking

    found = broken("rope", "initial_state", wrap, "encoding")
    assert found["padding"] == "fail"
    assert all(found[name] == "pass" for name in ("shift", "rotation", "causality", "cache"))


def test_states_that_turn_wrongly_are_found_where_nothing_reads_them():
    """No logit shows it, but whoever looks at the states does."""
    model = build("rope")
    for block in model.model.layers:
        block.self_attn.encoding.rotate = lambda query, key, state: (query, key)
    assert certify(model, num_tokens=16).passed
    for block in model.model.layers:
        block.self_attn.encoding.update = lambda state, *rest: state + 0.3
    found = verdicts(certify(model, num_tokens=16))
    assert found["rotation"] == "fail"
    assert all(found[name] == "pass" for name in ("shift", "causality", "cache", "padding"))


def test_errors_are_in_units_of_the_spread_of_the_logits():
    checks = Checker(build("rope"), 8, seed=0, limit=1e-6)
    spread = statistics.stdev(checks.expected.flatten().tolist())
    found = checks.expected.clone()
    assert checks.error(found, checks.expected) == 0
    found[1, 3, 5] += 0.25
    found[0, 2, 1] -= 0.5
    assert checks.error(found, checks.expected) == pytest.approx(0.5 / spread, rel=1e-9)
    found[0, 0, 0] = torch.nan
    assert checks.error(found, checks.expected) == float("inf")


def test_nan_and_infinity_fail():
    model = build("tape")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    certificate = certify(model, 12)
    assert not certificate.passed
    assert all(check.error == float("inf") for check in certificate.checks if check.verdict == "fail")
    assert "fail" in verdicts(certificate).values()


def test_notes_warn_of_a_weak_certificate():
    model = build("tape")
    assert certify(model, 12).notes == []
    for name, parameter in model.named_parameters():
        if name.endswith((".carry", ".mix_out")):
            torch.nn.init.zeros_(parameter)
    assert "state update is zero" in certify(model, 12).notes[0]
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


def test_classes_that_refuse_ids_in_their_own_way():
    sizes = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    found = {}
    for is_decoder in (True, False):
        config = BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64, is_decoder=is_decoder)
        torch.manual_seed(0)
        certificate = certify(BertLMHeadModel(config).double().eval(), 12)
        found[is_decoder] = verdicts(certificate)
        # a RuntimeError of PyTorch's
        assert "Ids from 1,000 are rejected" in certificate.checks[0].note
    assert (found[True]["causality"], found[True]["cache"], found[True]["padding"]) == ("pass", "pass", "pass")
    assert found[False]["causality"] == "fail"


def test_classes_without_a_key_value_cache():
    """The cache would be swallowed as an unknown argument, and every token read as the first one."""
    config = MambaConfig(vocab_size=41, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=0)
    certificate = certify(MambaForCausalLM(config).double().eval(), 12)
    assert certificate.passed
    cache = next(check for check in certificate.checks if check.name == "cache")
    assert (cache.verdict, cache.note) == ("does not apply", "This model class takes no key-value cache.")


def test_classes_that_are_not_made_for_float64():
    config = BloomConfig(vocab_size=41, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
    model = BloomForCausalLM(config).eval()
    padding = certify(model.double(), 12).checks[-1]
    if padding.verdict == "fail":
        assert "try float32" in padding.note
    assert certify(model.float(), 12).passed


def stopped(model):
    """A model that cannot run at all, in the way of PyTorch."""

    def stop(*inputs):
        raise RuntimeError("no kernel for Double\nand more")

    model.base_model.layers[0].register_forward_pre_hook(stop)
    return model.double().eval()


def test_models_that_do_not_run_differ_from_broken_ones():
    config = LlamaConfig(
        vocab_size=41, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ValueError, match=r"does not run in float64 \(no kernel for Double\); try another dtype\.$"):
        certify(stopped(LlamaForCausalLM(config)), 12)
    # in a model of ours that is a fault to be seen in full
    with pytest.raises(RuntimeError, match="no kernel"):
        certify(stopped(build("rope")), 12)


@pytest.mark.parametrize("rows", [2, 3, 6, 9, 16, 17, 20])
def test_short_tables_are_checked_as_far_as_they_go(rows):
    """Lengths are capped so that one id is left for a shift; nothing is refused."""
    certificate = certify(build("learned", max_position_embeddings=rows), num_tokens=16)
    assert certificate.passed
    assert certificate.num_tokens == min(16, rows - 1)
    found = {check.name: check for check in certificate.checks}
    assert found["shift"].verdict == "not promised"
    assert found["shift"].error > 1e-2
    for name in ("causality", "cache", "padding"):
        assert found[name].verdict == ("pass" if rows > 2 else "does not apply")
        assert ("only one token" in found[name].note) == (rows == 2)
    expected = (
        [] if rows > 16 else [f"The model takes at most {rows} tokens, so the checks used {rows - 1} instead of 16."]
    )
    assert certificate.notes == expected


def test_a_table_of_one_row_leaves_nothing_to_check():
    checks = certify(build("learned", max_position_embeddings=1), num_tokens=16).checks
    assert {check.verdict for check in checks} == {"does not apply"}
    assert "beyond the learned table of 1 rows" in checks[0].note


def test_ranges_that_are_drawn_from_cap_the_length_too():
    certificate = certify(build("randpe-sampled", {"range": 12}), num_tokens=16)
    assert certificate.passed
    assert (certificate.num_tokens, verdicts(certificate)["causality"]) == (11, "pass")


def test_broken_promises_are_found_in_short_tables():
    model = build("learned", max_position_embeddings=10)
    for block in model.model.layers:
        block.mlp.register_forward_hook(lambda module, inputs, output: output + 0.3 * output.mean(1, keepdim=True))
    found = verdicts(certify(model, num_tokens=16))
    assert (found["causality"], found["cache"], found["padding"]) == ("fail", "fail", "fail")


def test_short_tables_of_other_classes():
    config = GPT2Config(vocab_size=41, n_positions=14, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    certificate = certify(GPT2LMHeadModel(config).double().eval(), num_tokens=16)
    assert certificate.passed
    assert certificate.num_tokens == 13
    assert [verdicts(certificate)[name] for name in ("causality", "cache", "padding")] == ["pass"] * 3


def test_errors_that_no_length_helps_are_raised():
    model = build("learned")

    def refuse(*inputs):
        raise ValueError("no weights yet")

    model.model.layers[0].register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="no weights yet"):
        certify(model)


def test_single_precision_and_refusals():
    certificate = certify(build("tape", dtype=torch.float32), 12)
    assert certificate.passed
    assert certificate.limit == 1e-2
    with pytest.raises(ValueError, match="bfloat16, which is too imprecise"):
        certify(build("tape", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="num_tokens is 4"):
        certify(build("tape"), 4)


def test_the_model_is_left_as_it_was():
    model = build("tape").train()
    certify(model, 12)
    assert model.training
    assert "initial_state" not in vars(model.model.encoding)
