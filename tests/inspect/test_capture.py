"""What is watched is what the model does, and watching leaves no trace."""

import pytest
import torch

from cases import build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM
from equitape.inspect import frozen_state, visit_layers
from equitape.inspect.capture import decoder_of, updates_state
from equitape.kernels.reference import update_field


def records_of(model, tokens, **inputs):
    records = []
    visit_layers(model, tokens, lambda index, record: records.append((index, record)), **inputs)
    assert [index for index, _ in records] == list(range(len(records)))
    return [record for _, record in records]


@pytest.mark.parametrize("case", ["tape", "tape-options", "tape-fourier", "rope", "randpe"])
def test_records_are_the_models_own_outputs(case):
    model = build(case)
    tokens = draw_tokens(1, 11)
    records = records_of(model, tokens)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(tokens, output_attentions=True, output_position_states=True)
    assert len(records) == 3
    for record, attention, state in zip(records, expected.attentions, expected.position_states, strict=True):
        assert gap(record.attention, attention[0]) == 0
        assert gap(record.state, state[0]) == 0


def test_layers_with_an_encoding_of_their_own():
    window = {"sliding_window": 4, "sliding_layers": [1], "local_encoding": {"kind": "rope", "theta": 100.0}}
    first, local, last = records_of(build("tape2-carried", **window), draw_tokens(1, 7))
    assert first.state.shape == last.state.shape == (2, 7, 8)
    assert local.state is None
    assert gap(last.state[0], last.state[1]) > 1e-3


@pytest.mark.parametrize("case", ["nope", "alibi", "t5", "learned", "xpos"])
def test_encodings_without_a_state_for_every_token(case):
    records = records_of(build(case), draw_tokens(1, 7))
    assert all(record.state is None and record.mixing is None for record in records)
    assert not updates_state(build(case))


@pytest.mark.parametrize("case", ["tape", "tape-options"])
def test_mixing_matrices_and_attended_fields_make_the_next_state(case):
    """The next layer's state from this layer's by the definition, with the attended field averaged by hand."""
    model = build(case, {"layers": "all", "normalize": False})
    tokens = draw_tokens(1, 9)
    records = records_of(model, tokens)
    for index in (0, 1):
        record, part = records[index], model.model.layers[index].self_attn.encoding
        heads = record.state.repeat_interleave(2, dim=0)
        attended = torch.einsum("hnk,hkd->hnd", record.attention, heads)
        state = update_field(record.state[None], attended[None], None, part.carry, None, None)[0]
        z = torch.complex(*state.chunk(2, dim=-1))
        z = z + torch.einsum("ngh,hnm->gnm", record.mixing.to(z.dtype), z)
        assert gap(torch.cat((z.real, z.imag), dim=-1), records[index + 1].state) < 1e-12
    assert records[-1].mixing is None


def test_frozen_state_is_rope_on_the_same_weights():
    model = build("tape")
    rope = EquitapeForCausalLM(tiny_config("rope")).double().eval()
    rope.load_state_dict(model.state_dict(), strict=False)
    tokens = draw_tokens(2, 12)
    with torch.no_grad():
        before = model(tokens).logits
        with frozen_state(model):
            frozen = model(tokens).logits
        after = model(tokens).logits
        assert gap(frozen, rope(tokens).logits) < 1e-12
    assert gap(frozen, before) > 1e-2
    assert gap(before, after) == 0


def test_nothing_is_left_behind():
    model = build("tape")
    model.train()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    with pytest.raises(RuntimeError, match="stop"):
        visit_layers(model, draw_tokens(1, 5), lambda index, record: stop())
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def stop():
    raise RuntimeError("stop")


def test_looped_blocks_are_visited_each_time():
    model = build("tape", num_hidden_layers=4, num_loops=2)
    records = records_of(model, draw_tokens(1, 6))
    assert len(records) == 4
    assert all(record.mixing is not None for record in records)


def test_ids_are_those_asked_for():
    model = build("rope")
    ids = torch.arange(50, 57)[None]
    record = records_of(model, draw_tokens(1, 7), position_ids=ids)[0]
    phases = torch.atan2(record.state[0, :, 4], record.state[0, :, 0])
    assert torch.allclose(torch.exp(1j * phases), torch.exp(1j * ids[0].double()))


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"Linear.*equitape\.adapt"):
        decoder_of(torch.nn.Linear(2, 2))
