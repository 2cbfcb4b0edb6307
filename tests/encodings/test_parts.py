"""Decay, clock and move against their formulas written out in loops."""

import math
from dataclasses import replace

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from cases import build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM
from equitape.encodings import Geometry, Positions, build_encoding
from equitape.encodings.clock import ClockOptions, clock_drift
from equitape.encodings.columns import ColumnsEncoding
from equitape.encodings.decay import alibi_slopes
from equitape.encodings.heads import Columns, put_columns, take_columns
from equitape.encodings.phasors import apply_rotary, multiply
from equitape.encodings.positions import add_jumps, index_runs
from equitape.encodings.running import join_parts, running_sum, split_parts
from equitape.kernels import reference

SIZES = Geometry(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=2)
N = 7
SCALE = 8**-0.5
CPU = torch.device("cpu")


def columns_alone(layer, hidden, positions, dtype):
    """Queries and keys of zeros with the columns that a layer adds."""
    query, key = (
        torch.zeros(hidden.shape[0], heads, hidden.shape[1], 16, dtype=dtype)
        for heads in (layer.num_heads, layer.num_kv_heads)
    )
    return layer.columns(hidden, positions, None, dtype, SCALE).put(query, key)


def columns_of(encoding, ids, hidden, dtype=torch.float64, seed=0, sizes=SIZES):
    """What the columns of a randomised first layer add to the scaled scores: [B, H, N, N], and the layer."""
    layer = build_encoding(encoding, sizes).layer(0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    layer = layer.double()
    positions = Positions(ids=ids, origin=ids.amin(-1, keepdim=True))
    query, key = columns_alone(layer, hidden, positions, dtype)
    assert query.dtype == key.dtype == dtype
    key = key.repeat_interleave(2, dim=1)
    return SCALE * query.double() @ key.double().transpose(-1, -2), layer


@pytest.mark.parametrize("num_heads", [1, 4, 8, 12, 20])
def test_slopes_as_bloom(num_heads):
    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(num_heads, CPU).float(), theirs)


def test_slopes_down_to_the_slowest():
    assert alibi_slopes(8, CPU, 2**-16).tolist() == [2.0 ** (-2 * (h + 1)) for h in range(8)]
    # six heads: those of four, then every other one of eight
    assert alibi_slopes(6, CPU, 2**-16).tolist() == [2.0**-x for x in (4, 8, 12, 16, 2, 6)]


@pytest.mark.parametrize("decay", ["slopes", "learned", "gate"])
def test_every_decay_starts_at_the_slowest_slope(decay):
    sizes = {"hidden_size": 32, "head_dim": 8, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4}
    encoding = {"kind": "tape", "decay": decay, "decay_slowest": 2**-12}
    layer = build_encoding(encoding, Geometry(**sizes)).layer(0)
    ids = torch.arange(N)[None]
    query, key = columns_alone(layer, torch.zeros(1, N, 32), Positions(ids=ids, origin=ids[:, :1]), torch.float64)
    found = (SCALE * query @ key.transpose(-1, -2))[0, :, -1].diff()
    assert gap(found, torch.tensor([2.0**-3, 2**-6, 2**-9, 2**-12])[:, None].expand(-1, N - 1)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_alibi_is_linear_in_distance_in_every_dtype(dtype):
    """A slope or an id rounded to bfloat16 would be off by far more than this at a distance of 3000."""
    ids = torch.tensor([[500_000, 500_001, 503_000]])
    sizes = {"hidden_size": 32, "head_dim": 8, "num_layers": 1, "num_heads": 12, "num_kv_heads": 6}
    layer = build_encoding({"kind": "alibi"}, Geometry(**sizes)).layer(0)
    positions = Positions(ids=ids, origin=ids[:, :1])
    query, key = columns_alone(layer, torch.zeros(1, 3, 32), positions, dtype)
    scores = SCALE * query.double() @ key.double().repeat_interleave(2, dim=1).transpose(-1, -2)
    exponents = [h + 1 for h in range(8)] + [h + 0.5 for h in range(4)]
    for head, exponent in enumerate(exponents):
        for near, far, distance in ((1, 0, 1), (2, 0, 3000), (2, 1, 2999)):
            found = (scores[0, head, 2, far] - scores[0, head, 2, near]).item()
            assert found == pytest.approx(-distance * 2**-exponent, rel=1e-5)


def test_columns_inside_are_the_slowest_frequencies():
    x = torch.arange(16.0).expand(1, 2, 1, 16)
    columns = -torch.arange(1.0, 5.0).expand(1, 2, 1, 4)
    replaced = [0, 1, 2, 3, 4, 5, -1, -2, 8, 9, 10, 11, 12, 13, -3, -4]
    assert put_columns(x, columns, 2)[0, :, 0].tolist() == [replaced, replaced]
    assert put_columns(x, columns, 1)[0, :, 0].tolist() == [replaced, list(range(16))]
    for inside in (2, None):
        assert torch.equal(take_columns(put_columns(x, columns, inside), 4, inside is not None), columns)


@pytest.mark.parametrize("decay", ["slopes", "learned", "gate"])
def test_heads_that_do_not_decay_keep_their_frequencies(decay):
    """With "decaying", heads with columns are those of `true`, and the others those of RoPE; so are the scores."""
    ids = torch.arange(N)[None]
    hidden = torch.randn(1, N, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key = (torch.randn(1, count, N, 8, dtype=torch.float64) for count in (4, 2))
    found = []
    for options in ({}, {"decay": decay, "decay_inside": True}, {"decay": decay, "decay_inside": "decaying"}):
        encoding = build_encoding({"kind": "rope", "decay_heads": 0.5, **options}, SIZES).double()
        positions = encoding.map_ids(Positions(ids=ids, origin=ids[:, :1]), hidden, None)
        state = encoding.initial_state(positions, torch.float64)
        layer = encoding.layer(0).double()
        columns = layer.columns(hidden, positions, None, torch.float64, SCALE)
        rotated = (
            layer.rotate(query, key, state) if not options else layer.rotate_with_columns(query, key, state, columns)
        )
        found.append(rotated)
    for plain, inside, decaying in zip(*found, strict=True):
        half = plain.shape[1] // 2
        assert torch.equal(decaying[:, :half], inside[:, :half])
        assert torch.equal(decaying[:, half:], plain[:, half:])
        assert not torch.equal(inside[:, half:], plain[:, half:])


@pytest.mark.parametrize("decay", ["slopes", "learned", "gate"])
def test_decay_inside_is_the_same_decay(decay):
    ids = torch.tensor([[0, 1, 5, 6, 7, 8, 20]])
    hidden = torch.randn(1, N, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sizes = replace(SIZES, head_dim=16)
    found = [
        columns_of({"kind": "rope", "decay": decay, "decay_inside": inside}, ids, hidden, sizes=sizes)[0]
        for inside in (True, False)
    ]
    assert gap(*found) < 1e-12


@pytest.mark.parametrize("kind", ["nope", "rope", "tape"])
def test_slopes_are_the_same_part_everywhere(kind):
    ids = torch.tensor([[0, 1, 5, 6, 7, 8, 20]])
    hidden = torch.randn(1, N, 32, dtype=torch.float64)
    expected, _ = columns_of({"kind": "alibi"}, ids, hidden)
    found, _ = columns_of({"kind": kind, "decay": "slopes"}, ids, hidden)
    assert gap(found, expected) == 0


@pytest.mark.parametrize("speed", [1.0, 8.0])
def test_learned_slopes(speed):
    ids = torch.tensor([[0, 1, 5, 6, 7, 8, 20]])
    encoding = {"kind": "rope", "decay": "learned", "decay_heads": 0.5, "decay_speed": speed}
    started = build_encoding(encoding, SIZES).layer(0).decay
    assert gap(torch.nn.functional.softplus(speed * started.bias)[:2], alibi_slopes(2, CPU)) < 1e-6
    scores, layer = columns_of(encoding, ids, torch.zeros(1, N, 32))
    rates = torch.nn.functional.softplus(speed * layer.decay.bias.float())
    for head in range(4):
        rate = rates[head].item() if head < 2 else 0.0
        assert (scores[0, head, 6, 6] - scores[0, head, 6, 2]).item() == pytest.approx(15 * rate, rel=1e-6, abs=1e-9)


def test_forget_gate_as_fox_writes_it():
    """score_ij + sum of log sigmoid(-(w x_l + b)) over i >= l > j, up to a number that is the same for a whole row."""
    hidden = torch.randn(2, N, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores, layer = columns_of({"kind": "nope", "decay": "gate"}, torch.arange(N)[None], hidden)
    for batch in range(2):
        for head in range(4):
            group = head // 2
            logs = [
                -math.log1p(
                    math.exp((hidden[batch, token] @ layer.decay.weight[group] + layer.decay.bias[group]).item())
                )
                for token in range(N)
            ]
            for i in range(N):
                for j in range(i + 1):
                    expected = sum(logs[j + 1 : i + 1])
                    found = (scores[batch, head, i, j] - scores[batch, head, i, i]).item()
                    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("case", ["rope-learned", "rope-clock", "fox", "tape2", "tape-clock"])
def test_parts_start_as_the_identity_or_as_alibi(case):
    """A new model is the one without the part, which for decay is the model with ALiBi's slopes."""
    tokens = draw_tokens(2, 12)
    torch.manual_seed(0)
    # as many key-value heads as heads: a gate belongs to the former, a slope to the latter
    model = EquitapeForCausalLM(tiny_config(case, num_key_value_heads=4)).eval()
    encoding = model.config.encoding
    same = {"decay": "slopes", **{name: encoding[name] for name in ("decay_heads", "decay_slowest", "decay_inside")}}
    plain = EquitapeForCausalLM(
        tiny_config("nope" if encoding["kind"] == "fox" else "rope", same, num_key_value_heads=4)
    ).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    assert gap(model(tokens).logits, plain(tokens).logits) < 1e-5


def test_running_sums_start_again_and_skip_padding():
    steps = torch.rand(1, 2, 8, dtype=torch.float64)
    segments = torch.tensor([[3, 3, 3, 4, 4, 4, 4, 0]])
    valid = torch.tensor([[True, True, True, True, False, True, True, True]])
    runs = index_runs(segments, None)
    found = running_sum(steps, Positions(ids=segments, segments=runs, valid=valid), None)
    for head in range(2):
        total, before = 0.0, None
        for token in range(8):
            total = total if runs[0, token] == before else 0.0
            total += steps[0, head, token].item() * bool(valid[0, token])
            before = runs[0, token]
            assert found[0, head, token].item() == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parts_add_up_to_float32(dtype):
    numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 100_000
    parts = split_parts(numbers, dtype)
    assert parts.dtype == dtype
    # float16 has no numbers between 0 and 2^-24
    atol = 64 * 2.0**-24 if dtype == torch.float16 else 0
    torch.testing.assert_close(join_parts(parts), numbers, rtol=2e-7, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_parts_add_up_to_float32(dtype):
    """Compilers leave out casts to half precision and back, on which the parts must not depend."""
    numbers = torch.arange(70_000)[::7]
    parts = torch.compile(split_parts, fullgraph=True)(numbers, dtype)
    torch.testing.assert_close(join_parts(parts).long(), numbers, rtol=0, atol=0)


@pytest.mark.parametrize("decay", ["slopes", pytest.param("learned", marks=pytest.mark.inductor)])
def test_decay_in_half_precision(decay):
    """Ids above 256 have more bits than bfloat16, slopes too, and scores with a decay grow along the sequence."""
    model = build("rope", {"decay": decay}, dtype=torch.bfloat16, num_hidden_layers=1)
    tokens = draw_tokens(1, 1400)
    with torch.no_grad():
        fused = model(tokens, use_cache=False).logits
        # compiled for learned slopes alone: fixed ones are powers of two, and ids are split in the same way
        others = [torch.compile(model)(tokens, use_cache=False).logits] if decay == "learned" else []
        model.set_attn_implementation("eager")
        others.append(model(tokens, use_cache=False).logits)
        expected = model.float()(tokens, use_cache=False).logits
    for found in others:
        assert gap(found, expected) < 2 * gap(fused, expected)


def test_gradient_goes_through_one_part():
    number = torch.tensor([1234.567], requires_grad=True)
    split_parts(number, torch.bfloat16).float().sum().backward()
    assert number.grad.item() == pytest.approx(1 / 64, rel=1e-6)


@pytest.mark.parametrize(("speed", "most"), [(1.0, 2.0), (8.0, 2.0), (1.0, math.pi), (8.0, 1.5)])
def test_clock_by_hand(speed, most):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, N, 32, dtype=torch.float64, generator=generator)
    weight = torch.randn(2, 32, dtype=torch.float64, generator=generator)
    options = ClockOptions(clock=True, clock_speed=speed, clock_most=most)
    found = clock_drift(weight, x, Positions(ids=torch.arange(N)[None]), None, options)
    for batch in range(2):
        for head in range(2):
            total = 0.0
            for token in range(N):
                normed = x[batch, token] / math.sqrt(x[batch, token].square().mean().item() + 1e-6)
                # a token counts for 0 to `most` steps, of which the id has counted one
                pull = speed * (normed @ weight[head]).item()
                share = pull / (most - 1) if pull > 0 else pull
                total += (2 / (1 + math.exp(-share)) - 1) * (most - 1 if pull > 0 else 1)
                assert found[batch, head, token].item() == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("kind", ["rope", "tape"])
def test_a_faster_clock_is_a_larger_weight(kind):
    options = {"clock": True, "clock_speed": 4.0}
    model, usual = build(kind, options), build(kind, {**options, "clock_speed": 1.0})
    tokens = draw_tokens(2, 10)
    assert gap(model(tokens).logits, usual(tokens).logits) > 1e-3
    with torch.no_grad():
        usual.model.encoding.clock.mul_(4)
    assert gap(model(tokens).logits, usual(tokens).logits) < 1e-12


def test_clock_changes_the_model_and_learns():
    model = build("rope-clock", {"decay": "none"}).train()
    tokens = draw_tokens(2, 10)
    still = build("rope-clock", {"decay": "none"})
    with torch.no_grad():
        still.model.encoding.clock.zero_()
    assert gap(model(tokens).logits, still(tokens).logits) > 1e-3

    def loss():
        # transformers' own loss is in float32, too coarse for differences
        return torch.nn.functional.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    loss().backward()
    gradient = model.model.encoding.clock.grad
    # one entry by finite differences
    with torch.no_grad():
        step = 1e-5
        losses = []
        for sign in (1, -1):
            model.model.encoding.clock[1, 3] += sign * step
            losses.append(loss().item())
            model.model.encoding.clock[1, 3] -= sign * step
    assert gradient[1, 3].item() == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-6)


def test_move_by_hand():
    generator = torch.Generator().manual_seed(0)
    field, attended = (torch.randn(2, heads, N, 8, dtype=torch.float64, generator=generator) for heads in (2, 4))
    source, target = torch.randn(2, 2, 4, dtype=torch.float64, generator=generator)
    found = reference.move_field(field, attended, source, target)

    def number(x, *index):
        return complex(x[*index[:-1], index[-1]].item(), x[*index[:-1], index[-1] + 4].item())

    for batch, group, token, m in ((0, 0, 0, 0), (1, 1, 6, 3), (0, 1, 3, 2)):
        z = number(field, batch, group, token, m)
        a = sum(source[group, h].item() * number(attended, batch, h, token, m) for h in range(4))
        b = sum(target[group, h].item() * number(attended, batch, h, token, m) for h in range(4))
        assert abs(number(found, batch, group, token, m) - (z + z * a.conjugate() * b)) < 1e-12


def test_a_move_lands_on_the_distance_between_two_tokens():
    """Heads that look at one token each: a token at p moves to p + (target - source), for every frequency."""
    frequencies = torch.tensor([1.0, 0.3, 0.05, 0.01], dtype=torch.float64)

    def at(p):
        return torch.cat(((p * frequencies).cos(), (p * frequencies).sin()))[None, None, None]

    attended = torch.cat((at(3.0), at(11.0)), dim=1)
    source, target = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
    moved = reference.move_field(at(20.0), attended, source, target) - at(20.0)
    assert gap(moved, at(28.0)) < 1e-12


def test_jumps_by_hand():
    ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    jumps = torch.tensor([[0, 5, 0, 2, 7, 0, 1]])
    runs = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    assert add_jumps(ids, jumps, None).tolist() == [[0, 6, 7, 10, 14, 15, 17]]
    assert add_jumps(ids, jumps, runs).tolist() == [[0, 6, 7, 10, 7, 8, 10]]


@pytest.mark.parametrize("case", ["rope", "alibi", "tape2", "t5"])
def test_jumps_are_position_ids_further_ahead(case):
    model = build(case)
    tokens = draw_tokens(2, 10)
    jumps = torch.randint(0, 3, (2, 10), generator=torch.Generator().manual_seed(0))
    found = model(tokens, position_jumps=jumps).logits
    ids = torch.arange(10) + jumps.cumsum(-1)
    assert gap(found, model(tokens, position_ids=ids).logits) < 1e-12
    assert gap(found, model(tokens).logits) > 1e-3
    # padding on the left and packing count for themselves
    segments = torch.tensor([[0] * 4 + [1] * 6] * 2)
    packed = model(tokens, segment_ids=segments, position_jumps=jumps).logits
    alone = model(tokens[:, 4:], position_jumps=jumps[:, 4:]).logits
    assert gap(packed[:, 4:], alone) < 1e-10


def test_jumps_that_mean_nothing_are_refused():
    model = build("rope")
    tokens = draw_tokens(1, 4)
    for jumps, message in (
        (torch.zeros(1, 3, dtype=torch.long), r"position_jumps has shape \[1, 3\]; it must be \[1, 4\]"),
        (torch.zeros(1, 4), "must be integer, use"),
        (torch.tensor([[0, -1, 0, 0]]), "contains -1; jumps must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, position_jumps=jumps)
    past = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="do not pass past_key_values"):
        model(tokens, position_jumps=torch.zeros(1, 4, dtype=torch.long), past_key_values=past)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "slope"}, "decay is 'slope'; .* Did you mean 'slopes'"),
        ({"decay": "slopes", "decay_heads": 0.0}, "decay_heads is 0.0; it must be a number above 0"),
        ({"decay": "slopes", "decay_slowest": 1.0}, "decay_slowest is 1.0; it must be a number above 0 and below 1"),
        ({"clock": True, "clock_speed": 0.0}, "clock_speed is 0.0; it must be a number above 0"),
        ({"clock": True, "clock_most": 1.0}, "clock_most is 1.0; it must be a number above 1"),
        ({"decay": "gate", "decay_inside": True}, "needs head_dim 6 or more, not 4"),
        ({"decay": "gate", "decay_heads": 0.2}, "none of 2 heads; raise it to at least 0.5"),
    ],
)
def test_decays_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build("rope", options, head_dim=4)


@pytest.mark.parametrize(
    "case", ["tape2", "fox", "rope-clock", "tape-inside", "rope", "tensor_tape-l1r4", "tensor_tape-l4r1"]
)
def test_configurations_know_the_width_of_cached_keys(case):
    model = build(case)
    past = model(draw_tokens(1, 5), use_cache=True).past_key_values
    assert [layer.keys.shape[-1] for layer in past.layers] == model.config.key_cache_dims
    assert [layer.values.shape[-1] for layer in past.layers] == model.config.value_cache_dims


@pytest.mark.parametrize("decay", ["slopes", "learned"])
@pytest.mark.parametrize("inside", [False, True])
def test_heads_that_do_not_decay_have_no_slope(decay, inside):
    options = {"kind": "rope", "decay": decay, "decay_heads": 0.5, "decay_inside": inside}
    layer = build_encoding(options, SIZES).layer(0)
    positions = Positions(ids=torch.arange(N)[None], origin=torch.zeros(1, 1, dtype=torch.long))
    query = layer.columns(torch.zeros(1, N, 32), positions, None, torch.float32, SCALE).query
    assert query.shape[1] == 4
    assert query[:, :2].any()
    assert not query[:, 2:].any()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", ["alibi", "tape2"])
def test_key_columns_of_ids_are_made_once_for_all_blocks(case, autocast, monkeypatch):
    model, tokens, made = build(case, dtype=torch.float32), draw_tokens(2, 9), []

    def counted(numbers, dtype):
        made.append(dtype)
        return split_parts(numbers, dtype)

    monkeypatch.setattr("equitape.encodings.decay.split_parts", counted)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        once = model(tokens).logits
        assert made == [torch.bfloat16 if autocast else torch.float32]
        monkeypatch.setattr(ColumnsEncoding, "map_ids", lambda encoding, positions, *rest: positions)
        assert torch.equal(once, model(tokens).logits)
    assert len(made) == 1 + model.config.num_hidden_layers


@pytest.mark.parametrize("inside", [None, 1, 2])
def test_rotation_with_columns_keeps_what_attention_keeps_anyway(inside):
    query, key, field = (torch.randn(1, 2, N, 8, requires_grad=True) for _ in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        extra = Columns(torch.ones(1, 2, 1, 4), torch.ones(1, 1, N, 4), inside)
        found = apply_rotary(query, key, field, extra)
    assert set(kept) == {each.data_ptr() for each in (*found, field)}


@pytest.mark.parametrize("inside", [None, 1, 2])
@pytest.mark.parametrize(("trained", "fields"), [(False, 2), (True, 2), (True, 1)])
def test_columns_and_rotation_have_the_gradients_of_both_in_turn(inside, trained, fields):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    query, key, field = draw(2, 4, N, 8), draw(2, 2, N, 8), draw(1, fields, N, 8)
    extra = Columns(draw(1, 4, 1, 4), draw(1, 1, N, 4), inside)
    field = field if trained else field.detach()
    inputs = [query, key, extra.query, extra.key, *([field] if trained else [])]
    found = apply_rotary(query, key, field, extra)
    turns = [multiply(each, field.repeat_interleave(each.shape[1] // fields, dim=1)) for each in (query, key)]
    expected = extra.put(*turns)
    slopes = [torch.randn(each.shape, dtype=each.dtype, generator=generator) for each in found]
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)
    pairs = zip(*(torch.autograd.grad(outputs, inputs, slopes) for outputs in (found, expected)), strict=True)
    for one, two in pairs:
        assert gap(one, two) < 1e-12
