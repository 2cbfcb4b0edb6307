"""Standalone layers: equal to the decoder's, and to dense attention written out."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from cases import build, draw_tokens, gap, randomise, tiny_config
from equitape.nn import Attention, PositionalLayer, RotaryAttention, TapeAttention, make_encoding, widen

SIZES = {"num_kv_heads": 2}
IN_NN = [
    "nope",
    "rope",
    "rope-yarn",
    "rope-learned",
    "xpos",
    "alibi",
    "fox",
    "cope",
    "path",
    "fire",
    "tape",
    "tape-fourier",
    "tape2",
    "tensor_tape",
]


def layer(encoding="tape", seed=0, **options) -> Attention:
    """A layer with random weights in float64."""
    attention = Attention(32, 4, encoding, **{**SIZES, **options})
    randomise(attention, seed)
    return attention.double().eval()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stack_of(model, **options):
    """The decoder's attention layers as standalone ones with the same weights."""
    encoding, config = model.model.encoding, model.config
    shared = {"num_kv_heads": config.num_key_value_heads, **options}
    layers = []
    for index, block in enumerate(model.model.layers):
        own = Attention(config.hidden_size, config.num_attention_heads, encoding, layer=index, **shared).double().eval()
        own.load_state_dict(block.self_attn.state_dict())
        layers.append(own)
    return layers


def run_blocks(model, layers, tokens, **inputs):
    """The decoder written out around standalone layers."""
    x, state = model.model.embed_tokens(tokens), None
    for block, attention in zip(model.model.layers, layers, strict=True):
        after = block.post_attention_layernorm
        output, state = attention(
            block.input_layernorm(x), state, features=lambda y, x=x, after=after: after(x + y), **inputs
        )
        x = x + output
        x = x + block.mlp(after(x))
    return model.lm_head(model.model.norm(x))


@pytest.mark.parametrize("case", IN_NN)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_of_these_layers_is_the_decoder(case, implementation):
    model = build(case, attn_implementation=implementation)
    tokens = draw_tokens(2, 17)
    found = run_blocks(model, stack_of(model, implementation=implementation), tokens)
    assert gap(found, model(tokens, use_cache=False).logits) < 1e-12


def test_packed_rows_and_windows_are_the_decoder_s():
    model = build("tape", attn_implementation="sdpa", sliding_window=5)
    tokens, segments = draw_tokens(2, 17), torch.tensor([[3] * 6 + [1] * 11, [0] * 9 + [2] * 8])
    found = run_blocks(model, stack_of(model, window=5), tokens, segment_ids=segments)
    assert gap(found, model(tokens, segment_ids=segments, use_cache=False).logits) < 1e-12


def test_gradients_are_the_decoder_s():
    model = build("tape", attn_implementation="sdpa")
    layers = stack_of(model)
    tokens = draw_tokens(2, 9)
    run_blocks(model, layers, tokens).square().sum().backward()
    ours = [[weight.grad for weight in own.parameters()] for own in layers]
    model.zero_grad()
    model(tokens, use_cache=False).logits.square().sum().backward()
    for own, block in zip(ours, model.model.layers, strict=True):
        for a, b in zip(own, block.self_attn.parameters(), strict=True):
            assert gap(a, b.grad) < 1e-9 * float(b.grad.abs().max())


@pytest.mark.parametrize("kind", ["tuple", "dynamic", "static"])
@pytest.mark.parametrize("case", ["rope", "tape", "xpos", "alibi", "fire"])
def test_cached_calls_equal_one_call(kind, case):
    encoding = make_encoding(case, 32, 4, 2, **SIZES)
    layers = [layer(encoding, seed=index, layer=index) for index in range(2)]
    x = draw(2, 9, 32)
    full, state = x, None
    for own in layers:
        full, state = own(full, state)
    config = tiny_config(case, num_hidden_layers=2)
    caches = {
        "tuple": [(), ()],
        "dynamic": DynamicCache(),
        "static": StaticCache(config=config, max_cache_len=12),
    }[kind]
    parts, start = [], 0
    for size in (4, 1, 3, 1):
        y, state = x[:, start : start + size], None
        for index, own in enumerate(layers):
            if kind == "tuple":
                y, state, caches[index] = own(y, state, cache=caches[index])
            else:
                y, state = own(y, state, cache=caches)
        parts.append(y)
        start += size
    assert gap(torch.cat(parts, dim=1), full) < 1e-12


@pytest.mark.parametrize(
    "encoding",
    [
        "rope",
        "tape",
        "xpos",
        {"kind": "rope", "scaling": {"kind": "dynamic", "factor": 2, "original_max_positions": 4}},
    ],
)
def test_the_state_made_from_ids_is_that_of_the_first_layer(encoding):
    own, x, ids = layer(encoding), draw(2, 9, 32), torch.arange(9) + 10**6
    y, _ = own(x, own.initial_state(ids, x.dtype), positions=ids)
    assert gap(y, own(x, positions=ids)[0]) == 0


@pytest.mark.parametrize("case", ["rope", "tape", "nope", "alibi"])
def test_a_single_token_does_not_see_the_empty_rest_of_a_static_cache(case):
    own, x = layer(make_encoding(case, 32, 4, 2, **SIZES)), draw(2, 3, 32)
    cache = StaticCache(config=tiny_config(case, num_hidden_layers=2), max_cache_len=12)
    parts = [own(token, cache=cache)[0] for token in x.split(1, dim=1)]
    assert gap(torch.cat(parts, dim=1), own(x)[0]) < 1e-12


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_bidirectional_attention_commutes_with_a_permutation_of_tokens(implementation):
    """Ids travel with their tokens; nothing else may depend on the order."""
    first, second = layer(causal=False, implementation=implementation), layer(causal=False, seed=1, layer=1)
    x, ids = draw(2, 11, 32), torch.randint(0, 40, (2, 11))
    order = torch.randperm(11)

    def run(x, ids):
        return second(*first(x, positions=ids), positions=ids)

    for ours, theirs in zip(run(x, ids), run(x[:, order], ids[:, order]), strict=True):
        assert gap(ours.index_select(-2, order), theirs) < 1e-12


def test_bidirectional_tokens_see_later_ones():
    attention, x = layer(causal=False), draw(1, 6, 32)
    changed = torch.cat((x[:, :5], x[:, 5:] + 1), dim=1)
    assert gap(attention(x)[0][:, 0], attention(changed)[0][:, 0]) > 1e-3


def dense(attention, x, mask, state, context=None, context_state=None):
    """Attention written out with complex numbers. mask: [N, K]."""
    there, z_there = (x, state) if context is None else (context, context_state)
    heads, groups, dim = 4, 2, attention.head_dim

    def project(linear, inputs, count):
        return linear(inputs).unflatten(-1, (count, dim)).transpose(1, 2)

    def turn(x, field):
        z = torch.complex(*field.repeat_interleave(x.shape[1] // field.shape[1], dim=1).chunk(2, -1))
        y = torch.complex(*x.chunk(2, -1)) * z
        return torch.cat((y.real, y.imag), -1)

    query = turn(project(attention.q_proj, x, heads), state)
    key = turn(project(attention.k_proj, there, groups), z_there).repeat_interleave(2, dim=1)
    value = torch.cat((project(attention.v_proj, there, groups), z_there.expand(len(x), -1, -1, -1)), -1)
    scores = (query @ key.mT / dim**0.5).masked_fill(~mask, -torch.inf)
    output, carried = (scores.softmax(-1) @ value.repeat_interleave(2, dim=1)).split(dim, dim=-1)
    output = attention.o_proj(output.transpose(1, 2).flatten(2))
    features = output / output.square().mean(-1, keepdim=True).sqrt()
    part = attention.encoding
    moved = state + torch.einsum("gh,bhnd->bgnd", part.carry, carried)
    psi = torch.nn.functional.silu(features @ part.gate.weight.T)
    mixed = torch.einsum("gi,bni,ih,bhnd->bgnd", part.mix_out, psi, part.mix_in, moved)
    return output, moved + mixed


INDEX = torch.arange(12)
DISTANCE = INDEX[:, None] - INDEX
MASKS = {
    "causal": ({}, DISTANCE >= 0),
    "window": ({"window": 4}, (DISTANCE >= 0) & (DISTANCE < 4)),
    "both": ({"causal": False}, DISTANCE > -100),
    "near": ({"causal": False, "window": 3}, DISTANCE.abs() < 3),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, each) for name in MASKS for each in ("sdpa", "eager")), ("near", "flex_attention")],
)
def test_every_mask_is_that_of_dense_attention(name, implementation):
    options, mask = MASKS[name]
    attention, x = layer(implementation=implementation, **options), draw(2, 12, 32)
    state = attention.initial_state(INDEX, torch.float64)
    # torch has no backward of FlexAttention on the CPU
    with torch.no_grad():
        for ours, theirs in zip(attention(x), dense(attention, x, mask, state), strict=True):
            assert gap(ours, theirs) < 1e-12


@pytest.mark.parametrize("form", ["blocks", "boolean", "additive"])
def test_a_given_mask_is_that_of_dense_attention(form):
    """Blocks of 4 tokens see themselves and the first block: a mask of the user's own."""
    attention, x = layer(), draw(2, 12, 32)

    def rule(batch, head, query, key):
        return (query // 4 == key // 4) | (key < 4)

    mask = rule(0, 0, INDEX[:, None], INDEX)
    given = {
        "blocks": lambda: create_block_mask(rule, None, None, 12, 12, device="cpu", BLOCK_SIZE=4),
        "boolean": lambda: mask,
        "additive": lambda: torch.zeros(12, 12, dtype=torch.float64).masked_fill(~mask, -1e30),
    }[form]()
    state = attention.initial_state(INDEX[None], torch.float64)
    with torch.no_grad():
        for ours, theirs in zip(attention(x, mask=given), dense(attention, x, mask, state), strict=True):
            assert gap(ours, theirs) < 1e-12


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_cross_attention_is_that_of_dense_attention(implementation):
    """Two sequences with ids on one axis; the second has padding and another state."""
    attention = layer(implementation=implementation)
    x, context = draw(2, 5, 32), draw(2, 12, 32, seed=1)
    ids, there = torch.tensor([[7, 2, 9, 4, 4]]), INDEX[None] + 3
    state, field = (attention.initial_state(each, torch.float64) for each in (ids, there))
    expected = dense(attention, x, torch.ones(5, 12, dtype=torch.bool), state, context, field)
    for given in (None, field):
        found = attention(x, positions=ids, context=context, context_state=given, context_positions=there)
        for ours, theirs in zip(found, expected, strict=True):
            assert gap(ours, theirs) < 1e-12
    found, _ = attention(x + 0, positions=ids + 50, context=context, context_positions=there + 50)
    assert gap(found, expected[0]) < 1e-10


def test_cross_attention_gradients_reach_both_states():
    attention = layer()
    x, context = draw(1, 5, 32), draw(1, 8, 32, seed=1)
    fields = [draw(1, 2, n, 8, seed=n).requires_grad_() for n in (5, 8)]

    def loss(state, field):
        y, state = attention(x, state, context=context, context_state=field)
        return y.square().sum() + state.square().sum()

    assert torch.autograd.gradcheck(loss, fields)


def test_the_pieces_make_the_layer():
    """A model with its own projections and attention call gets the numbers of the whole layer."""
    attention = layer()
    pieces = PositionalLayer(32, 4, "tape", **SIZES).double()
    pieces.encoding.load_state_dict(attention.encoding.state_dict())
    x = draw(2, 9, 32)
    state = pieces.initial_state(torch.arange(9)[None], torch.float64)
    query = attention.q_proj(x).unflatten(-1, (4, 8)).transpose(1, 2)
    key, value = (linear(x).unflatten(-1, (2, 8)).transpose(1, 2) for linear in (attention.k_proj, attention.v_proj))
    query, key = pieces.apply_rotary(query, key, state)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, pieces.widen(value, state), is_causal=True, scale=pieces.scale, enable_gqa=True
    )
    output, carried = pieces.split(output)
    y = attention.o_proj(output.transpose(1, 2).flatten(2))
    expected = attention(x, features=lambda y: y)
    assert gap(y, expected[0]) < 1e-12
    assert gap(pieces.update(state, carried, y), expected[1]) < 1e-12


def test_neighbours_in_order_of_halves_have_the_scores_of_interleaved_rope():
    """Queries and keys of a model that rotates neighbouring channels, as torchtune and x-transformers do."""
    pieces, ids = PositionalLayer(32, 4, "rope").double(), torch.arange(6)
    query, key = draw(2, 4, 6, 8), draw(2, 4, 6, 8, seed=1)
    turn = torch.polar(torch.ones(4).double(), 10000.0 ** -(torch.arange(4).double() / 4)) ** ids[:, None]

    def scores(query, key):
        return query @ key.mT

    def interleaved(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)

    halves = [x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (query, key)]
    found = scores(*pieces.apply_rotary(*halves, pieces.initial_state(ids, torch.float64)))
    assert gap(found, scores(interleaved(query), interleaved(key))) < 1e-12


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast):
    exact = layer().float()
    first = layer().float() if autocast else layer().bfloat16()
    x = X.to(first.q_proj.weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, state = first(x)
        y, again = first(y, state)
    assert state.dtype == again.dtype == x.dtype
    assert y.dtype == torch.bfloat16
    with torch.no_grad():
        wanted = exact(*exact(X.float()))
    assert gap(y, wanted[0]) < 0.05 * float(wanted[0].abs().max())


def test_padding_changes_nothing():
    attention, x = layer(causal=False), draw(1, 7, 32)
    padded = torch.cat((torch.full((1, 3, 32), 9.0, dtype=torch.float64), x), dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 7])
    alone, state = attention(x)
    found, field = attention(padded, padding_mask=mask)
    assert gap(found[:, 3:], alone) < 1e-12
    assert gap(field[:, :, 3:], state) < 1e-12


def test_shared_weights_are_trained_by_all_layers_and_belong_to_none():
    encoding = make_encoding("t5", 32, 4, 2, **SIZES)
    first, second = (layer(encoding, layer=index) for index in range(2))
    x = draw(1, 6, 32)
    y, state = first(x)
    second(x + y, state)[0].square().sum().backward()
    assert encoding.table.grad.abs().sum() > 0
    assert not any("table" in name for own in (first, second) for name in own.state_dict())


def test_a_layer_starts_as_rope_and_its_weights_are_initialised():
    torch.manual_seed(0)
    tape = TapeAttention(32, 4, num_kv_heads=2)
    rope = RotaryAttention(32, 4, num_kv_heads=2)
    rope.load_state_dict(tape.state_dict(), strict=False)
    x = torch.randn(2, 6, 32)
    assert gap(tape(x)[0], rope(x)[0]) < 1e-6
    assert all(torch.isfinite(weight).all() for weight in tape.parameters())
    assert tape.encoding.mix_in.std() > 0.1


def test_the_last_layer_has_no_update_and_reads_no_features():
    last = TapeAttention(32, 4, layer=1, num_layers=2)
    assert list(last.encoding.parameters()) == []
    state = torch.randn(2, 4, 6, 8)
    assert last(X.float(), state, features=pytest.fail)[1] is state


def test_a_layer_without_positions_passes_the_state_on():
    state = standalone()(X)[1]
    y, passed = standalone("nope")(X, state)
    assert passed is state
    assert y.shape == X.shape


def test_a_later_layer_makes_the_state_of_a_context():
    """A context that comes without a state, such as the output of another encoder, has the initial one."""
    attention, context = layer(layer=1), draw(2, 5, 32)
    state = attention.initial_state(torch.arange(5), torch.float64)
    given = attention(X, FIELD, context=context, context_state=state)
    for ours, theirs in zip(attention(X, FIELD, context=context), given, strict=True):
        assert gap(ours, theirs) == 0


def test_options_as_dictionaries_are_those_of_the_encoding():
    scaling = {"kind": "linear", "factor": 4.0}
    for kind, made in (
        ("rope", RotaryAttention(32, 4, theta=500.0, scaling=scaling)),
        ("tape", TapeAttention(32, 4, theta=500.0, scaling=scaling)),
    ):
        plain = Attention(32, 4, {"kind": kind, "theta": 500.0}).initial_state(torch.arange(6) / 4)
        assert gap(made.initial_state(torch.arange(6)), plain) < 1e-6


def test_checkpointed_layers_have_the_same_gradients():
    layers, x = [layer(seed=index, layer=index) for index in range(2)], draw(2, 7, 32)

    def gradients(run):
        y, state = x, None
        for own in layers:
            y, state = run(own, y, state)
        (y.square().sum() + state.square().sum()).backward()
        found = [weight.grad for own in layers for weight in own.parameters()]
        for own in layers:
            own.zero_grad()
        return found

    kept = gradients(lambda own, y, state: checkpoint(own, y, state, use_reentrant=False))
    for ours, theirs in zip(kept, gradients(lambda own, y, state: own(y, state)), strict=True):
        assert gap(ours, theirs) < 1e-12 * float(theirs.abs().max())


def test_compiled_layers_agree():
    """For two lengths with one graph."""
    attention = layer().float()
    step = torch.compile(attention, fullgraph=True, backend="aot_eager")
    counts = torch._dynamo.utils.counters["stats"]
    graphs = counts["unique_graphs"]
    for length in (8, 11):
        x = draw(2, length, 32).float()
        torch._dynamo.mark_dynamic(x, 1)
        for ours, theirs in zip(step(x), attention(x), strict=True):
            assert gap(ours, theirs) < 1e-5
    assert counts["unique_graphs"] == graphs + 1


X, FIELD = draw(2, 6, 32), draw(2, 2, 6, 8)
PIECES = PositionalLayer(32, 4, "tape", **SIZES).double()


def standalone(encoding="tape", **options):
    """With the sizes of X."""
    return Attention(32, 4, encoding, **{**SIZES, **options}).double()


class QuantizedLayer(DynamicLayer):
    """Named like those of transformers, which need further packages."""


def quantised_cache():
    cache = DynamicCache()
    cache.layers = [QuantizedLayer()]
    return cache


REFUSED = {
    "x has shape [2, 6, 31]; it must be a tensor [B, N, 32]": lambda: standalone()(X[..., 1:]),
    "x is a list; it must be a tensor [B, N, 32]": lambda: standalone()([1, 2]),
    "x is torch.int64; it must be floating point: embed ids first": lambda: standalone()(X.long()),
    "x is torch.bool; it must be floating point": lambda: standalone()(X.bool()),
    "x is torch.complex64; it must be floating point": lambda: standalone()(X.to(torch.complex64)),
    "context is torch.int32; it must be floating point": lambda: standalone()(X, context=X.int()),
    "The state is torch.int64; it must be floating point": lambda: PIECES.initial_state(torch.arange(6), torch.int64),
    "positions has shape [7]; with 6 tokens in 2 rows it must be a tensor [6] or [2, 6]": lambda: standalone()(
        X, positions=torch.arange(7)
    ),
    "positions is a list; with 6 tokens in 2 rows it must be a tensor": lambda: standalone()(X, positions=[0] * 6),
    "hidden_size 30 is not a multiple of num_heads 4": lambda: TapeAttention(30, 4),
    "head_dim must be even; it is 7": lambda: TapeAttention(28, 4),
    "give at least one row and one token": lambda: standalone("tape2")(X[:, :0]),
    "positions are torch.float32, but encoding 'tape2' counts whole tokens": lambda: standalone("tape2")(
        X, positions=torch.arange(X.shape[1]).float()
    ),
    "Encoding 'tape2' with decay_inside needs head_dim 6 or more": lambda: standalone("tape2", head_dim=4),
    "The encoding has 2 axes, so positions must be given": lambda: standalone(num_axes=2)(X),
    "positions has shape [6]; with 6 tokens in 2 rows and 2 axes it must be a tensor [6, 2] or": lambda: standalone(
        num_axes=2
    )(X, positions=torch.arange(6)),
    "The state has shape [2, 4, 6, 8], but this layer expects [2, 2, 6, 8]": lambda: standalone()(X, draw(2, 4, 6, 8)),
    "The state has shape [1, 1, 6, 8], but this layer expects [2, 2, 6, 8]": lambda: standalone()(
        X, standalone("rope")(X)[1]
    ),
    "The state has shape [2, 2, 6, 8], but this layer expects [2, 1, 6, 8]": lambda: standalone("rope")(
        X, standalone()(X)[1]
    ),
    "The state is a tuple, but this layer expects": lambda: standalone()(X, (FIELD,)),
    "The state is torch.float32 and the tokens are torch.float64": lambda: standalone()(X, FIELD.float()),
    "Layer 1 got no state": lambda: standalone(layer=1)(X),
    "needs causal attention": lambda: standalone("alibi", causal=False),
    "cannot attend to a context": lambda: standalone("alibi")(X, context=X[:, 1:]),
    "context has 1 rows and x 2": lambda: standalone()(X, context=X[:1]),
    "The context_state has shape [2, 2, 6, 8], but this layer expects [2, 2, 5, 8]": lambda: standalone()(
        X, context=X[:, 1:], context_state=FIELD
    ),
    "belong to a context, which is missing": lambda: standalone()(X, context_state=FIELD),
    "What features returned has shape [2, 6, 31]; it must be a tensor [2, 6, 32]": lambda: standalone()(
        X, features=lambda y: y[..., 1:]
    ),
    "takes ids of one axis, not 2; use one of 'rope', 'tape'": lambda: standalone("xpos", num_axes=2),
    "cannot have a decay or a clock": lambda: standalone("tape2", num_axes=2),
    "has 2 frequencies in head_dim 4, too few for 3 axes": lambda: RotaryAttention(8, 2, num_axes=3),
    "Encoding 'learned' adds to the embeddings": lambda: standalone("learned"),
    "Encoding 't5' has weights that all layers share": lambda: standalone("t5"),
    "mask has shape [6, 5]; it must be [6, 6]": lambda: standalone()(X, mask=torch.ones(6, 5).bool()),
    "mask is torch.int64; it must be torch.bool": lambda: standalone()(X, mask=torch.ones(6, 6).long()),
    "A cache needs causal attention": lambda: standalone(causal=False)(X, cache=()),
    "cannot use a cache here": lambda: standalone("fox")(X, cache=()),
    "'tape2' keeps exact numbers in cached keys, which this cache would round": lambda: standalone("tape2")(
        X, cache=quantised_cache()
    ),
    "Pass a mask instead of a window on several axes with a cache": lambda: standalone(num_axes=2, window=2)(
        X, positions=torch.zeros(6, 2), cache=(FIELD, torch.cat((FIELD, FIELD), dim=-1))
    ),
    "cache is a tuple of 1": lambda: standalone()(X, cache=(draw(1),)),
    "cache is a list; it must be transformers' Cache or a tuple": lambda: standalone()(X, cache=[]),
    "Unknown keyword 'dropuot'. Did you mean 'dropout'?": lambda: TapeAttention(32, 4, dropuot=0.1),
    "Unknown keyword 'thet'. Did you mean 'theta'?": lambda: TapeAttention(32, 4, thet=100.0),
    "dropout is 1.5; it must be": lambda: standalone(dropout=1.5),
    "window is 2.5; it must be a whole number": lambda: standalone(window=2.5),
    "num_heads 4 is not a multiple of num_kv_heads 3": lambda: standalone(num_kv_heads=3),
    "The layer has hidden_size 32, but its encoding was made with 64": lambda: standalone(
        make_encoding("tape", 64, 4, 2)
    ),
    "The layer has num_layers 5, but its encoding was made with 2": lambda: standalone(
        make_encoding("tape", 32, 4, 2), num_layers=5
    ),
    "num_layers is 0; it must be a whole number of 1 or more": lambda: make_encoding("tape", 32, 4, 0),
    "layer is 2; the model has layers 0 to 1": lambda: TapeAttention(32, 4, layer=2, num_layers=2),
    "carried_frequencies needs a narrower value projection": lambda: PositionalLayer(
        32, 4, {"kind": "tape", "carried_frequencies": 2}
    ),
    "positions has shape [1, 6, 2]; it must be a tensor [N] or [B, N]": lambda: PIECES.initial_state(
        torch.zeros(1, 6, 2)
    ),
    "query has shape [2, 6, 4, 8]; it must be [B, 4, N, 8]": lambda: PIECES.apply_rotary(
        draw(2, 6, 4, 8), FIELD, FIELD
    ),
    "key has shape [2, 2, 5, 8]; it must be [2, 2, 6, 8]": lambda: PIECES.apply_rotary(
        draw(2, 4, 6, 8), FIELD[:, :, 1:], FIELD
    ),
    "value has shape [2, 6, 2, 8]; it must be [B, 2, N, 8]": lambda: PIECES.widen(draw(2, 6, 2, 8), FIELD),
    "The state has shape [2, 2, 5, 8], but this layer expects": lambda: PIECES.widen(FIELD, FIELD[:, :, 1:]),
    "value has shape [2, 2, 6, 8], and the columns to append [2, 2, 5, 8]": lambda: widen(FIELD, FIELD[:, :, 1:]),
    "The output of attention has width 64; it must be [..., 16]": lambda: PIECES.split(draw(2, 6, 64)),
    "The update needs what attention carried": lambda: PIECES.update(FIELD, None, X),
    "carried has shape [2, 6, 4, 8]; with these features it must be [2, 4, 6, 8]": lambda: PIECES.update(
        FIELD, draw(2, 6, 4, 8), X
    ),
    "features has shape [2, 6, 31]; it must be [B, N, 32]": lambda: PIECES.update(FIELD, draw(2, 4, 6, 8), X[..., 1:]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_input_is_refused(message):
    with pytest.raises((ValueError, TypeError)) as error:
        REFUSED[message]()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_state_with_unchanged_frequencies_passes_from_layer_to_layer():
    """They are there once for all heads; a whole field is refused."""
    torch.manual_seed(0)
    whole = {"kind": "tape", "carried_frequencies": 2, "init_scale": 1.0}
    layers = [Attention(32, 4, whole, num_kv_heads=2, layer=index, num_layers=3) for index in range(2)]
    x = torch.randn(2, 6, 32)
    y, state = layers[0](x)
    assert list(state.shape) == [2, 1, 6, 8 + 2 * 4]
    _, later = layers[1](y, state)
    before, after = (layers[0].model_encoding.field(each) for each in (state, later))
    assert list(after.shape) == [2, 2, 6, 8]
    assert torch.equal(before[..., [1, 3, 5, 7]], after[..., [1, 3, 5, 7]])
    assert gap(before[..., [0, 2, 4, 6]], after[..., [0, 2, 4, 6]]) > 1e-2
    with pytest.raises(ValueError, match=r"expects \[2, 1, 6, 16\]"):
        layers[1](y, before)
