"""The table of stability: what must not move does not, what may does, and the ablation is what it says."""

import pytest
import torch

from cases import build, draw_tokens, gap
from equitape.inspect import measure_stability
from equitape.inspect.stability import TWIN, unequivariant_twin


def table(stability):
    return {(change.model, change.disturbance): change for change in stability.changes}


def test_shifted_ids_move_only_the_ablation():
    stability = measure_stability(build("tape"), draw_tokens(1, 20), 1)
    found = table(stability)
    assert {model for model, _ in found} == {"rope", "tape", TWIN}
    assert {where for _, where in found} == {"3 [BOS] in front", "ids from 3", "ids from 1,000", "ids from 1,000,000"}
    for (model, where), change in found.items():
        assert len(change.attention) == len(change.products) == 3
        # the first layer's state is the start's, which no mixing has touched
        assert change.products[0] < 1e-9
        if where == "3 [BOS] in front":
            assert min(change.attention) > 1e-2
            assert (change.products[2] > 1e-2) == (model != "rope")
        elif model == TWIN:
            assert change.attention[2] > 1e-2
            assert change.products[2] > 1e-3
        else:
            assert max(change.attention) < 1e-9
            assert max(change.products) < 1e-9


def test_differences_by_loops():
    """One of the numbers, by its definition."""
    model, tokens = build("tape"), draw_tokens(1, 10)
    longer = torch.cat((torch.full((1, 3), 5), tokens), dim=1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        before, after = (model(text, output_attentions=True, output_position_states=True) for text in (tokens, longer))
    a, b = before.attentions[1][0], after.attentions[1][0][:, 3:, 3:]
    expected = sum(abs(b[h, i, j] - a[h, i, j]) / 2 for h in range(4) for i in range(10) for j in range(10)) / 40
    found = table(measure_stability(model, tokens, 5))["tape", "3 [BOS] in front"]
    assert found.attention[1] == pytest.approx(expected.item())

    def products(states):
        z = torch.complex(*states[0].chunk(2, dim=-1))
        return torch.einsum("gnm,gkm->nk", z.conj(), z).real

    p, q = products(before.position_states[2]), products(after.position_states[2])[3:, 3:]
    assert found.products[2] == pytest.approx(((q - p).norm() / p.norm()).item())


def test_ablation_without_mixing_is_the_model_itself():
    """TensorTape by the same weights: all that differs is the mixing, so without it nothing does."""
    model = build("tape", {"mlp_update": False})
    twin = unequivariant_twin(model.model)
    tokens = draw_tokens(2, 9)
    with torch.no_grad():
        assert gap(twin(tokens).last_hidden_state, model.model(tokens).last_hidden_state) < 1e-12
    assert twin.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_ablation_mixes_one_component_as_strongly():
    model = build("tape")
    twin = unequivariant_twin(model.model)
    ours, theirs = (decoder.layers[0].self_attn.encoding for decoder in (model.model, twin))
    psi = torch.rand(8, dtype=torch.float64)
    both = torch.kron(ours.mix_out @ torch.diag(psi) @ ours.mix_in, torch.eye(2, dtype=torch.float64))
    one = theirs.mix_out @ torch.diag(psi) @ theirs.mix_in
    expected = torch.kron(
        ours.mix_out @ torch.diag(psi) @ ours.mix_in, torch.diag(torch.tensor([2**0.5, 0.0], dtype=torch.float64))
    )
    assert gap(one, expected) < 1e-12
    assert one.norm().item() == pytest.approx(both.norm().item())


def test_other_models_join_the_table():
    stability = measure_stability(build("rope"), draw_tokens(1, 8), 1, {"trained": build("tensor_tape-components")})
    found = table(stability)
    assert {model for model, _ in found} == {"rope", "trained"}
    assert found["trained", "ids from 3"].attention[2] > 1e-3
    assert "does not update" in stability.notes[0]


def test_what_cannot_be_measured_is_reported():
    notes = " ".join(measure_stability(build("learned"), draw_tokens(1, 8), 1).notes)
    assert "ids from 1,000: Position id 1007 is beyond" in notes
    notes = " ".join(measure_stability(build("tape-options"), draw_tokens(1, 8), 1).notes)
    assert (
        "TensorTape does not support this model's scaling, layers, source, normalize and complex_mixing. 'rope': the "
        "same weights with the update switched off."
    ) in notes
    long = measure_stability(build("rope", max_position_embeddings=256), draw_tokens(1, 200), 1)
    assert long.num_tokens == 128
    assert "first 128 of 200" in long.notes[0]


@pytest.mark.parametrize("part", [{"decay": "slopes"}, {"clock": True}, {"move": True}, {"carried_frequencies": 2}])
def test_parts_that_the_ablation_lacks_are_reported(part):
    stability = measure_stability(build("tape", part), draw_tokens(1, 8), 1)
    assert {change.model for change in stability.changes} == {"rope", "tape"}
    assert f"TensorTape does not support this model's {next(iter(part))}." in stability.notes[0]


def test_texts_that_fill_a_table_are_reported():
    model = build("learned", max_position_embeddings=16)
    stability = measure_stability(model, draw_tokens(1, 16), 1)
    assert stability.changes == []
    assert stability.shown_layers("attention") == []
    notes = " ".join(stability.notes)
    assert "3 [BOS] in front: Position id 18 is beyond" in notes
    assert "ids from 3: Position id 18 is beyond" in notes
    # a model with a shorter table than the first one's
    stability = measure_stability(build("rope"), draw_tokens(1, 20), 1, {"short": model})
    assert {change.model for change in stability.changes} == {"rope"}
    assert "short: Position id 19 is beyond" in " ".join(stability.notes)
    # where one disturbance fits, it is measured
    stability = measure_stability(model, draw_tokens(1, 14), 1, starts=(2, 3))
    assert [change.disturbance for change in stability.changes] == ["ids from 2"]


def test_a_model_at_its_start_is_called_so():
    model = build("tape")
    for name, parameter in model.named_parameters():
        if name.endswith((".carry", ".mix_out")):
            torch.nn.init.zeros_(parameter)
    stability = measure_stability(model, draw_tokens(1, 8), 1)
    assert "zero everywhere" in stability.notes[-1]
    assert all(max(change.attention) < 1e-9 for change in stability.changes if "ids" in change.disturbance)


def test_one_layer_has_nothing_to_update():
    notes = measure_stability(build("tape", num_hidden_layers=1), draw_tokens(1, 8), 1).notes
    assert "disabled in all layers" in notes[-1]


def test_drawn_positions_are_the_same_ones_each_time():
    model = build("randpe-sampled")
    before = torch.random.get_rng_state()
    found = table(measure_stability(model, draw_tokens(1, 8), 1))
    assert max(found["randpe", "ids from 1,000"].attention) == 0
    assert min(found["randpe", "3 [BOS] in front"].attention) > 1e-2
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_ablation_leaves_layers_with_an_encoding_of_their_own_alone():
    window = {"sliding_window": 6, "sliding_layers": [0, 2], "local_encoding": "tape", "num_hidden_layers": 4}
    stability = measure_stability(build("tape", **window), draw_tokens(1, 12), 1)
    assert {change.model for change in stability.changes} == {"rope", "tape", "not equivariant"}


def test_shown_products_are_those_of_layers_with_a_state():
    """As in Gemma 3, where five of six layers have an encoding of their own."""
    local = [layer for layer in range(14) if (layer + 1) % 4]
    window = {"sliding_window": 6, "sliding_layers": local, "local_encoding": "rope", "num_hidden_layers": 14}
    stability = measure_stability(build("tape", **window), draw_tokens(1, 8), 1, starts=(2,))
    assert stability.shown_layers("attention") == [1, 2, 4, 8, 14]
    assert stability.shown_layers("products") == [4, 8, 12]
    assert all(value is not None for change, values in stability.rows("products") for value in values)


def test_shown_layers():
    for layers, expected in ((2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])):
        model = build("rope", num_hidden_layers=layers)
        assert measure_stability(model, draw_tokens(1, 4), 1, starts=()).shown_layers("attention") == expected
