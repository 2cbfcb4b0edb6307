"""TAPE: its start, its symmetries, and two independent oracles (the paper's tensors, complex arithmetic)."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM
from equitape.encodings import Geometry, Positions, build_encoding
from equitape.encodings.base import ENCODINGS
from equitape.encodings.frequencies import Scaling
from equitape.encodings.phasors import multiply
from equitape.kernels.reference import update_field

VARIANTS = ["tape", "tape-options", "tape-fourier"]


def same_weights(case, model, **options):
    """Another encoding with the trunk of `model`."""
    other = EquitapeForCausalLM(tiny_config(case, options)).to(model.dtype)
    other.load_state_dict(model.state_dict(), strict=False)
    return other.eval()


@pytest.mark.parametrize("options", [{}, {"complex_mixing": True}, {"normalize": True}, {"source": "mlp"}])
def test_zero_start_equals_rope(options):
    rope = build("rope")
    tape = same_weights("tape", rope, **options)
    tokens = draw_tokens(2, 12)
    # normalising divides by the square root of 1 + epsilon
    assert gap(tape(tokens).logits, rope(tokens).logits) < (1e-6 if "normalize" in options else 1e-12)


@pytest.mark.parametrize("case", VARIANTS)
def test_random_weights_differ_from_rope(case):
    """The guard without which every other test here would be empty."""
    tape = build(case)
    rope = same_weights("rope", tape)
    assert gap(tape(draw_tokens(2, 12)).logits, rope(draw_tokens(2, 12)).logits) > 1e-2


@pytest.mark.parametrize("case", VARIANTS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_turning_any_frequency_of_the_start_changes_no_logit(case, dtype, limit, monkeypatch):
    model = build(case, dtype=dtype)
    tokens = draw_tokens(2, 12)
    expected = model(tokens, output_position_states=True)
    initial_state = model.model.encoding.initial_state
    angles = 6.3 * torch.rand(4, dtype=torch.float64)
    turn = torch.cat((angles.cos(), angles.sin())).to(dtype)[None, None, None]

    def turned(positions, dtype):
        field = initial_state(positions, dtype)
        return multiply(field, turn.expand(1, field.shape[1], 1, -1))

    monkeypatch.setattr(model.model.encoding, "initial_state", turned)
    found = model(tokens, output_position_states=True)
    assert gap(found.logits, expected.logits) < limit
    # the field itself is equivariant: every layer's turns by the same angles
    for ours, theirs in zip(found.position_states, expected.position_states, strict=True):
        size = theirs.abs().max().item()
        assert gap(ours, multiply(theirs, turn.expand(1, 2, 1, -1))) < limit * max(size, 1.0)


def test_turning_one_token_alone_does_change_logits():
    model = build("tape")
    tokens = draw_tokens(1, 8)
    ids = torch.arange(8)[None]
    moved = ids.clone()
    moved[0, 4:] += 3
    assert gap(model(tokens, position_ids=ids).logits, model(tokens, position_ids=moved).logits) > 1e-3


@pytest.mark.parametrize("case", [*VARIANTS, "tensor_tape"])
@given(st.permutations(range(9)))
@settings(max_examples=5, deadline=None)
def test_permuting_tokens_ids_and_mask_permutes_outputs(case, order):
    model = build(case)
    tokens, ids = draw_tokens(2, 9), torch.arange(9)[None]
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].expand(2, 1, 9, 9)
    order = torch.tensor(order)
    with torch.no_grad():
        expected = model(tokens, position_ids=ids, attention_mask=mask).logits
        found = model(tokens[:, order], position_ids=ids[:, order], attention_mask=mask[:, :, order][..., order]).logits
    assert gap(found, expected[:, order]) < 1e-10


@pytest.mark.parametrize("options", [{}, {"attention_update": False}, {"mlp_update": False}, {"mixer_size": 3}])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2)])
def test_phasor_form_equals_tensor_form(options, heads):
    """Values and gradients, at L = R = 2 in float64."""
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 8}
    tape = build("tape", options, **sizes)
    tensor = build("tensor_tape", options, **sizes)
    tensor.load_state_dict(tape.state_dict())
    tokens = draw_tokens(2, 11)
    results = []
    for model in (tape, tensor):
        output = model(tokens, labels=tokens)
        output.loss.backward()
        results.append((output.logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert gap(results[0][0], results[1][0]) < 1e-10
    for name, grad in results[0][1].items():
        assert gap(grad, results[1][1][name]) < 1e-10, name


def complex_update(field, attended, gate, carry, mix_in, mix_out, normalize):
    """The update in complex arithmetic, written from the formulas."""

    def read(x):
        return torch.complex(*x.chunk(2, dim=-1))

    def weight(w):
        return torch.complex(w[0], w[1]) if w.dim() == 3 else w.to(torch.complex128)

    z = read(field)
    if attended is not None:
        z = z + torch.einsum("gh,bhnm->bgnm", weight(carry), read(attended))
    if gate is not None:
        inner = torch.einsum("ig,bgnm->binm", weight(mix_in), z) * (gate / (1 + (-gate).exp())).mT[..., None]
        z = z + torch.einsum("gi,binm->bgnm", weight(mix_out), inner)
    if normalize:
        z = z / (z.abs().square().mean(-1, keepdim=True) + 1e-8).sqrt()
    return torch.cat((z.real, z.imag), dim=-1)


def update_inputs(groups, heads, is_complex, carries=True, mixes=True):
    batch, length, dim, mixer = 2, 3, 6, 5
    parts = (2,) if is_complex else ()

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    return (
        draw(batch, groups, length, dim),
        draw(batch, heads, length, dim) if carries else None,
        draw(batch, length, mixer) if mixes else None,
        draw(*parts, groups, heads) if carries else None,
        draw(*parts, mixer, groups) if mixes else None,
        draw(*parts, groups, mixer) if mixes else None,
    )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize(("carries", "mixes"), [(True, True), (True, False), (False, True)])
def test_update_in_complex_arithmetic(is_complex, normalize, carries, mixes):
    inputs = update_inputs(2, 4, is_complex, carries, mixes)
    found = update_field(*inputs, normalize=normalize)
    assert gap(found, complex_update(*inputs, normalize)) < 1e-12


def test_half_precision_is_widened_before_it_is_squared():
    """The square of 300 is more than float16 holds: with an infinite mean, the field would become zero."""
    field = (300 * torch.randn(2, 3, 5, 16)).half()
    found = update_field(field, None, None, None, None, None, normalize=True)
    assert found.dtype == torch.float16
    expected = complex_update(field.double(), None, None, None, None, None, True)
    # rounded as a factor and as a product, by 2**-11 at most each time
    torch.testing.assert_close(found.double(), expected, rtol=2**-10, atol=0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("is_complex", [False, True])
def test_update_gradcheck(is_complex, normalize):
    inputs = update_inputs(2, 4, is_complex)
    assert torch.autograd.gradcheck(lambda *given: update_field(*given, normalize=normalize), inputs)


@pytest.mark.parametrize("case", VARIANTS)
def test_model_gradcheck(case):
    """Through rotation, attention, carry and mix of a whole decoder."""
    model = build(case, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    embeddings = torch.randn(1, 4, 8, dtype=torch.float64, requires_grad=True)
    parameters = [p for name, p in model.named_parameters() if "encoding" in name]

    def run(embeddings, *_):
        return model(inputs_embeds=embeddings, use_cache=False).logits[..., :3]

    assert torch.autograd.gradcheck(run, (embeddings, *parameters))


@pytest.mark.parametrize("options", [{}, {"mlp_update": False}, {"attention_update": False}])
def test_normalised_field_has_unit_mean_square(options):
    model = build("tape", {"normalize": True, **options})
    states = model(draw_tokens(2, 10), output_position_states=True).position_states
    for state in states[1:]:
        square = 2 * state.square().mean(-1)
        torch.testing.assert_close(square, torch.ones_like(square), rtol=0, atol=1e-4)
    plain = build("tape", options)(draw_tokens(2, 10), output_position_states=True).position_states[-1]
    assert (2 * plain.square().mean(-1) - 1).abs().max() > 0.1


@pytest.mark.parametrize(
    ("layers", "updating"),
    [("all", {0, 1, 2}), ("last_half", {2}), ("first_and_middle", {0, 1}), ([0, 2], {0, 2}), ([1], {1})],
)
def test_chosen_blocks_update(layers, updating):
    model = build("tape", {"layers": layers}, num_hidden_layers=4)
    with_weights = {
        int(name.split(".")[2])
        for name, _ in model.named_parameters()
        if name.startswith("model.layers") and "encoding" in name
    }
    assert with_weights == updating
    states = model(draw_tokens(1, 8), output_position_states=True).position_states
    changed = {index for index in range(3) if gap(states[index], states[index + 1]) > 1e-6}
    assert changed == updating
    width = model.config.head_dim
    assert model.config.value_cache_dims == [2 * width if index in updating else width for index in range(4)]


def test_looped_blocks_update_in_every_loop():
    model = build("tape", num_hidden_layers=4, num_loops=2)
    states = model(draw_tokens(1, 8), output_position_states=True).position_states
    assert len(states) == 4
    assert all(gap(states[index], states[index + 1]) > 1e-6 for index in range(3))


@pytest.mark.parametrize("source", ["attention", "mlp"])
def test_source_of_the_gate(source):
    """Whether the gate reads the features after attention or what the feed-forward layer made of them."""
    model = build("tape", {"source": source})
    seen = {}
    block = model.model.layers[0]
    block.self_attn.encoding.gate.register_forward_pre_hook(lambda _, inputs: seen.update(gate=inputs[0]))
    block.post_attention_layernorm.register_forward_hook(lambda *hook: seen.update(attention=hook[2]))
    block.mlp.register_forward_hook(lambda *hook: seen.update(mlp=hook[2]))
    model(draw_tokens(1, 6))
    assert torch.equal(seen["gate"], seen[source])


def test_fourier_start_depends_on_its_seed_and_on_nothing_else():
    first, again, other = (
        build("tape", {"init": "fourier", "seed": seed})(
            draw_tokens(1, 6), output_position_states=True
        ).position_states[0]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert gap(first, other) > 0.1
    half = build("tape", {"init": "fourier"}, dtype=torch.bfloat16)
    state = half(draw_tokens(1, 6), output_position_states=True).position_states[0]
    assert torch.equal(state, first.to(torch.bfloat16))


def make(num_heads=64, num_kv_heads=32, head_dim=32, **options):
    cls = ENCODINGS["tape"]
    sizes = Geometry(hidden_size=64, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, num_layers=2)
    return cls(cls.options_class(**options), sizes)


def test_fourier_start_has_unit_mean_square():
    """Over 1024 phasors, whose squares spread by 1 around their mean of 1."""
    ids = torch.tensor([[0, 7, 1000]])
    field = make(num_kv_heads=64, init="fourier").initial_state(Positions(ids=ids), torch.float64)
    for square in (2 * field.square()).mean((0, 1, 3)).tolist():
        assert square == pytest.approx(1.0, abs=0.1)


def test_fourier_start_can_be_interpolated():
    """With a factor of 4, four times as far is what was there before."""
    ids = torch.tensor([[0, 1, 5, 300]])
    plain = make(init="fourier").initial_state(Positions(ids=ids), torch.float64)
    linear = make(init="fourier", scaling=Scaling(kind="linear", factor=4.0))
    assert gap(linear.initial_state(Positions(ids=4 * ids), torch.float64), plain) < 1e-12
    assert gap(linear.initial_state(Positions(ids=ids), torch.float64), plain) > 0.1


@pytest.mark.parametrize("is_complex", [False, True])
def test_spread_of_the_weights_at_the_start(is_complex):
    """In units of 1 / sqrt(fan-in): H = 64 attended, G = 32 into the mixer, I = 128 out of it."""
    layer = make(init_scale=0.5, complex_mixing=is_complex).layer(0)
    layer.reset_parameters(0.02)
    for weight, expected in ((layer.carry, 0.5 / 8), (layer.mix_in, 32**-0.5), (layer.mix_out, 0.5 / 128**0.5)):
        # of 2048 numbers or more the spread is known to 2 %
        assert weight.std().item() == pytest.approx(expected, rel=0.1)
        assert abs(weight.mean().item()) < 0.1 * expected


def test_number_of_parameters_is_the_papers():
    """In the paper's table 0.44M more than RoPE (155.33M and 154.89M); here 0.42M, since the last block has none."""
    sizes = {
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12,
    }  # fmt: skip
    with torch.device("meta"):
        more, fewer = (EquitapeForCausalLM(tiny_config(kind, **sizes)).num_parameters() for kind in ("tape", "rope"))
    groups, mixer = 12, 48
    assert more - fewer == 11 * (768 * mixer + 2 * mixer * groups + groups * groups)
    assert round((more - fewer) / 1e6, 2) == 0.42


def test_a_field_inside_the_value_takes_its_columns():
    model = build("tape2-carried")
    assert [block.self_attn.v_proj.out_features for block in model.model.layers] == [2 * 4, 2 * 4, 2 * 8]
    assert [block.self_attn.o_proj.in_features for block in model.model.layers] == [4 * 4, 4 * 4, 4 * 8]
    assert model.config.value_cache_dims == [8, 8, 8]


def test_a_field_inside_the_value_updates_some_frequencies():
    """The others stay those of RoPE: frequencies 1 and 3 of 4, and their imaginary parts behind."""
    states = build("tape2-carried")(draw_tokens(2, 12), output_position_states=True).position_states
    changed, kept = [0, 2, 4, 6], [1, 3, 5, 7]
    for before, after in pairwise(states):
        assert torch.equal(before[..., kept], after[..., kept])
        assert gap(before[..., changed], after[..., changed]) > 1e-2


@pytest.mark.parametrize("options", [{}, {"move": True, "complex_mixing": True, "normalize": True}])
def test_the_update_of_some_frequencies_is_that_of_a_smaller_field(options):
    """Heads of 4 channels that hold only those frequencies, with the same weights."""
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}
    generator = torch.Generator().manual_seed(0)
    kinds = [({"carried_frequencies": 2, **options}, 8), (options, 4)]
    encodings = [build_encoding({"kind": "tape", **chosen}, Geometry(**sizes, head_dim=dim)) for chosen, dim in kinds]
    layers = [encoding.layer(0).double() for encoding in encodings]
    with torch.no_grad():
        for parameter in layers[0].parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    layers[1].load_state_dict(layers[0].state_dict())
    field, carried = (torch.randn(2, *shape, generator=generator).double() for shape in ((2, 5, 8), (4, 5, 4)))
    features = torch.randn(2, 5, 32, generator=generator).double()
    changed, kept = [0, 2, 4, 6], [1, 3, 5, 7]
    state = encodings[0].state_of(field)
    assert torch.equal(encodings[0].field(state), field)
    assert torch.equal(layers[0].extra_values(state), field[..., changed])
    found = encodings[0].field(layers[0].update(state, carried, features, features))
    assert torch.equal(found[..., kept], field[..., kept])
    assert gap(found[..., changed], layers[1].update(field[..., changed], carried, features, features)) < 1e-12


@pytest.mark.parametrize("options", [{}, {"clock": True}, {"init": "fourier"}])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_field_with_some_changed_frequencies_rotates_like_the_whole(options, groups):
    """Outputs and gradients: those of the whole field at the changed frequencies, and at all with a trained start."""
    geometry = Geometry(hidden_size=32, num_heads=4, num_kv_heads=groups, num_layers=2, head_dim=8)
    encoding = build_encoding({"kind": "tape", "carried_frequencies": 2, **options}, geometry)
    layer = encoding.layer(0)
    generator = torch.Generator().manual_seed(0)
    drift = torch.randn(1, groups, 5, generator=generator) if options.get("clock") else None
    start = encoding.initial_state(Positions(torch.arange(5)[None], drift=drift), torch.float64)
    assert list(start.shape) == [1, 1, 5, encoding.state_width]
    query, key, state, *of_outputs = (
        torch.randn(2, *shape, generator=generator).double()
        for shape in ((4, 5, 8), (groups, 5, 8), start.shape[1:], (4, 5, 8), (groups, 5, 8))
    )
    whole = encoding.field(state).requires_grad_()
    inputs = [each.requires_grad_() for each in (query, key, state)]
    expected = multiply(query, whole), multiply(key, whole)
    found = layer.rotate(*inputs)
    for each, wanted in zip(found, expected, strict=True):
        assert gap(each, wanted) < 1e-12
    *wanted, of_whole = torch.autograd.grad(expected, [query, key, whole], of_outputs)
    *gradients, of_state = torch.autograd.grad(found, inputs, of_outputs)
    for each, own in zip(gradients, wanted, strict=True):
        assert gap(each, own) < 1e-10
    # the gradient of a field is spread over the parts of its state
    spread = torch.autograd.grad(encoding.field(state), state, of_whole)[0]
    trained = slice(None) if options.get("clock") else slice(start.shape[-1] - 4 * groups, None)
    assert gap(of_state[..., trained], spread[..., trained]) < 1e-10
    assert bool(of_state[..., : -4 * groups].any()) == bool(options.get("clock"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "ropy"}, "Did you mean 'rope'"),
        ({"source": "atention"}, "Did you mean 'attention'"),
        ({"mixer_size": 0}, "mixer_size is 0; it must be a whole number of 1 or more"),
        ({"carried_frequencies": 3}, "carried_frequencies 3; for heads of 8 it must be one of 1, 2"),
        ({"carried_frequencies": 4}, "must be one of 1, 2"),
        ({"carried_frequencies": 2, "attention_update": False}, "attention carries nothing"),
        ({"layers": [2]}, "nothing would read an update by the last block"),
        ({"layers": "half"}, "use 'all', 'first_and_middle', 'last_half'"),
        ({"scaling": {"kind": "dynamic", "factor": 2.0, "original_max_positions": 8}}, "cannot be 'dynamic'"),
        ({"init": "fourier", "scaling": {"kind": "ntk", "factor": 2.0}}, "use 'linear'"),
        ({"mixersize": 3}, "no option 'mixersize'. Did you mean 'mixer_size'"),
        ({"normalize": "yes"}, "must be true or false"),
        ({"theta": True}, "must be a number"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_config("tape", options)
