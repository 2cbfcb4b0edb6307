"""T5, FIRE and CoPE against their formulas written out in loops, or against transformers."""

import math

import pytest
import torch
from bias_memory import PeakMemory
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.t5.modeling_t5 import T5Attention

from cases import build, draw_tokens, gap, tiny_config
from equitape import EquitapeForCausalLM
from equitape.encodings import Geometry, Positions
from equitape.encodings.base import ENCODINGS, LayerEncoding
from equitape.encodings.fire import FIRELayer
from equitape.encodings.t5 import bucket
from equitape.model import masks as model_masks
from equitape.nn import backends, core

SIZES = Geometry(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, num_layers=2)
N = 7


def bias_of(kind, options, query=None, key=None, ids=None, visible=None, scale=1.0):
    """The bias of one layer with random parameters, and the layer itself."""
    encoding = ENCODINGS[kind](ENCODINGS[kind].options_class(**options), SIZES).double()
    layer = encoding.layer(0).double()
    for module in (encoding, layer):
        module.reset_parameters(0.02)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.arange(N)[None] if ids is None else ids
    positions = Positions(ids=ids)
    state = encoding.initial_state(positions, torch.float64)
    query = torch.zeros(1, 4, N, 8, dtype=torch.float64) if query is None else query
    return layer.bias(query, key, state, positions, ids, visible, scale), layer, state


def test_t5_buckets_as_transformers():
    distance = torch.arange(0, 300)
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(bucket(distance, 32, 128), theirs)


def test_t5_bias_looks_the_table_up():
    bias, _, table = bias_of("t5", {"num_buckets": 6, "max_distance": 10})
    for i in range(N):
        for j in range(i + 1):
            assert torch.equal(bias[0, :, i, j], table[int(bucket(torch.tensor(i - j), 6, 10))])


def test_t5_table_starts_with_the_spread_of_the_model():
    sizes = {"num_attention_heads": 32, "hidden_size": 64, "initializer_range": 0.05}
    model = EquitapeForCausalLM(tiny_config("t5", {"num_buckets": 32, "max_distance": 128}, **sizes))
    # of 1024 numbers the spread is known to 2 %
    assert model.model.encoding.table.std().item() == pytest.approx(0.05, rel=0.1)


def test_fire_by_its_formula():
    ids = torch.tensor([[0, 2, 3, 7, 30, 31, 90]])
    bias, layer, _ = bias_of("fire", {"width": 5, "initial_threshold": 8.0}, ids=ids)
    c, threshold = layer.c.item(), abs(layer.threshold_factor.item() * 8.0)
    inner, outer = layer.inner, layer.outer
    for i in range(N):
        for j in range(i + 1):
            p, q = ids[0, i].item(), ids[0, j].item()
            value = math.log(abs(c * (p - q)) + 1) / (math.log(abs(c * max(p, threshold)) + 1) + 1e-6)
            hidden = torch.relu(inner.weight[:, 0] * value + inner.bias)
            torch.testing.assert_close(bias[0, :, i, j], outer.weight @ hidden + outer.bias)


def test_cope_by_counting():
    """Values at the keys that are seen, and all gradients."""
    query = torch.randn(1, 4, N, 8, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, N, 8, dtype=torch.float64, requires_grad=True)
    visible = torch.ones(N, N, dtype=torch.bool).tril()
    visible[:, 1] = False
    scale = 8**-0.5
    bias, layer, _ = bias_of("cope", {"num_positions": 4}, query, key, visible=visible[None, None], scale=scale)
    grad_output = torch.randn(4, N, N, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for head in range(4):
        for i in range(N):
            for j in torch.nonzero(visible[i]).flatten().tolist():
                q = query[0, head, i]
                gates = [torch.sigmoid(scale * q @ key[0, head // 2, t]) for t in range(j, i + 1) if visible[i, t]]
                count = sum(gates).clamp(max=3.0)
                low, high = math.floor(count.item()), math.ceil(count.item())
                at = q @ layer.embedding
                expected = at[low] * (1 - (count - low)) + at[high] * (count - low)
                torch.testing.assert_close(bias[0, head, i, j], expected)
                total = total + grad_output[head, i, j] * expected
    leaves = (query, key, layer.embedding)
    found = torch.autograd.grad((bias[0] * grad_output)[:, visible].sum(), leaves)
    for one, other in zip(found, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(one, other)


def test_cope_counts_in_float32():
    """An embedding that alternates shows the fraction of every count; of 40 bfloat16 holds no more than quarters."""
    cls = ENCODINGS["cope"]
    layer = cls(cls.options_class(num_positions=64), SIZES).layer(0)
    torch.nn.init.zeros_(layer.embedding)
    layer.embedding.data[1] = torch.tensor([1.0, -1.0]).repeat(32)
    layer = layer.bfloat16()
    query = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)
    query[..., :2] = 1
    # one channel alone, so that no score is rounded
    key = torch.zeros(1, 2, 200, 8, dtype=torch.bfloat16)
    key[..., 0] = torch.randn(1, 2, 200)
    visible = torch.ones(1, 1, 1, 200, dtype=torch.bool)
    bias = layer.bias(query, key, None, None, None, visible, 1.0)
    for head in range(4):
        count = 0.0
        for j in reversed(range(200)):
            count += 1 / (1 + math.exp(-key[0, head // 2, j, 0].item()))
            fraction, sign = count % 1, (-1) ** int(count)
            expected = sign * (1 - 2 * fraction) if count < 63 else -1
            # some roundings of numbers up to 1
            assert bias[0, head, 0, j].item() == pytest.approx(expected, abs=0.02)
        assert count > 70


def test_cope_gathers_few_keys_from_one_place():
    """Keys past the last embedding, or hidden, are most of a long row: gradients of one place come one by one."""
    num_tokens, num_positions = 256, 16
    gathered = []

    class Gathers(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.gather.default:
                gathered.append(args[2])
            return function(*args, **(kwargs or {}))

    query, key = (torch.randn(1, heads, num_tokens, 8, dtype=torch.float64) for heads in (4, 2))
    visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()[None, None]
    with Gathers():
        bias_of("cope", {"num_positions": num_positions}, query, key, visible=visible, scale=8**-0.5)
    assert len(gathered) == 2
    for index in gathered:
        assert torch.nn.functional.one_hot(index, num_positions).sum(-2).max() < num_tokens / 4


def test_fire_starts_with_a_network_that_bends():
    """As torch's own layers start, whatever the model's initializer_range: with zero offsets it would be a line."""
    torch.manual_seed(0)
    model = EquitapeForCausalLM(tiny_config("fire"))
    layer = model.model.layers[0].self_attn.encoding
    for linear in (layer.inner, layer.outer):
        bound = linear.weight.shape[1] ** -0.5
        for parameter in (linear.weight, linear.bias):
            assert parameter.abs().max() <= bound
        assert linear.weight.abs().max() > 0.7 * bound
    # of one query and 101 keys
    ratios = torch.linspace(0, 1, 101).view(1, 1, 101, 1)
    heights = layer.outer(torch.relu(layer.inner(ratios)))
    assert heights.shape == (1, 4, 1, 101)
    # of a line these are rounding errors
    assert heights.diff(n=2, dim=-1).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("case", ["alibi", "t5", "fire", "cope", "path-gate"])
def test_gradients_agree_between_eager_and_sdpa(case):
    tokens = draw_tokens(2, 10)
    found = {}
    for implementation in ("eager", "sdpa"):
        model = build(case)
        model.set_attn_implementation(implementation)
        model(tokens, labels=tokens).loss.backward()
        found[implementation] = {name: p.grad for name, p in model.named_parameters()}
    for name, grad in found["eager"].items():
        assert gap(grad, found["sdpa"][name]) < 1e-12, name


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
@pytest.mark.parametrize("key_value_heads", [2, 4])
@pytest.mark.parametrize("inputs", ["one row", "rows", "jumps", "padding"])
@pytest.mark.parametrize("case", ["t5", "fire"])
def test_score_mod_is_the_twin_of_bias(case, inputs, key_value_heads, precision):
    """Jumps lead past the last bucket of T5 and past the threshold of FIRE."""
    model = build(case, dtype=precision, num_key_value_heads=key_value_heads)
    tokens = draw_tokens(1 if inputs == "one row" else 2, 40)
    given = {}
    if inputs == "jumps":
        given["position_ids"] = torch.arange(40) + 9 * (torch.arange(40) > torch.tensor([[7], [19]]))
    if inputs == "padding":
        given["attention_mask"] = torch.ones_like(tokens)
        given["attention_mask"][1, :5] = 0
    with torch.no_grad():
        expected = model(tokens, **given).logits
        model.set_attn_implementation("flex_attention")
        found = model(tokens, **given).logits
    real = given.get("attention_mask", torch.ones_like(tokens)).bool()
    limit = 1e-10 if precision == torch.float64 else 1e-5
    assert gap(found[real], expected[real]) < limit * expected[real].abs().max()


def scored(layer, state, ids):
    """What `score_mod` adds to scores of 0: [1, 4, N, N]."""
    count = ids.shape[1]
    add_bias = layer.score_mod(state, Positions(ids=ids), ids)
    places = torch.meshgrid(torch.arange(1), torch.arange(4), torch.arange(count), torch.arange(count), indexing="ij")
    return add_bias(torch.zeros(places[0].shape), *places)


@pytest.mark.parametrize("width", [1, 2, 5, 31, 32, 33])
@pytest.mark.parametrize("knots", ["anywhere", "steep", "outside", "equal", "some", "none"])
def test_fire_is_made_of_straight_lines(knots, width):
    """Its network bends at -bias / weight of each hidden unit, seen for distances over positions from 0 to 1."""
    torch.manual_seed(width)
    ids = torch.arange(60)[None]
    _, layer, _ = bias_of("fire", {"width": width, "initial_threshold": 8.0}, ids=ids)
    with torch.no_grad():
        weight, bias = layer.inner.weight[:, 0], layer.inner.bias
        if knots == "steep":
            layer.inner.weight *= 6
        if knots == "outside":
            bias.copy_(-weight * torch.tensor([-3.0, 5.0]).repeat(17)[:width])
        if knots == "equal":
            bias.copy_(-weight * torch.tensor([0.0, 0.5, 1.0]).repeat(11)[:width])
        if knots in ("some", "none"):
            weight[:: 2 if knots == "some" else 1] = 0
            bias[::4] = 0
        for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
            layer.to(dtype)
            expected = layer.bias(ids, None, None, Positions(ids=ids), ids, None, 1.0)
            found = scored(layer, None, ids)
            assert found.dtype == dtype
            assert gap(found, expected) < limit * expected.abs().max()


def test_the_kernel_of_fire_gets_its_options(monkeypatch):
    """With torch's own, compiling takes minutes, and the kernel needs more shared memory than a GPU has."""
    seen, plain = [], backends.flex_attention
    monkeypatch.setattr(
        backends, "flex_attention", lambda *given, **more: seen.append(more["kernel_options"]) or plain(*given, **more)
    )
    for case in ("t5", "fire"):
        with torch.no_grad():
            build(case, attn_implementation="flex_attention", num_hidden_layers=1)(draw_tokens(1, 5))
    assert seen == [None, FIRELayer.kernel_options]


def test_fire_is_not_trained_by_flex_attention():
    model = build("fire").train()
    model.set_attn_implementation("flex_attention")
    tokens = draw_tokens(2, 10)
    with pytest.raises(
        ValueError, match="cannot train encoding 'fire'; use attention 'sdpa' with a dense mask, or compute without"
    ):
        model(tokens)
    model.requires_grad_(False)
    assert torch.isfinite(model(tokens).logits).all()


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of a tensor that an operator returned."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.count = max(self.count, result.numel())
        return result


def copies_of(model):
    return next(part.bias_copies for part in model.modules() if isinstance(part, LayerEncoding))


@pytest.mark.parametrize("masks", [2**26, 1000], ids=["dense mask", "mask in rows"])
@pytest.mark.parametrize("case", ["t5", "fire", "cope", "path"])
def test_biases_in_blocks_are_those_of_all_scores(case, masks, monkeypatch):
    """Three queries at a time: same logits and gradients, with left padding, and no tensor of all scores."""
    rows, columns = 2, 40
    tokens = draw_tokens(rows, columns)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0

    def run():
        model = build(case, attn_implementation="sdpa")
        with LargestTensor() as largest:
            logits = model(input_ids=tokens, attention_mask=mask).logits * mask[..., None]
            logits.square().sum().backward()
        return logits, {name: each.grad for name, each in model.named_parameters()}, largest.count, model

    logits, gradients, all_scores, model = run()
    heads = model.config.num_attention_heads
    assert all_scores >= rows * heads * columns * columns
    query = copies_of(model) * 8 * rows * heads * columns
    monkeypatch.setattr(core, "MAX_BIAS_BYTES", 5 * query)
    monkeypatch.setattr(core, "BLOCK_BIAS_BYTES", 3 * query)
    monkeypatch.setattr(model_masks, "MAX_MASK_BYTES", masks)
    in_blocks, same, few_scores, _ = run()
    assert few_scores < rows * heads * columns * columns
    assert gap(in_blocks, logits) < 1e-12
    for name, gradient in gradients.items():
        assert gap(same[name], gradient) < 1e-9, name


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", ["t5", "fire", "cope", "path"])
def test_keys_of_a_bias_are_last_in_memory(case, rows):
    """Compiled with recomputation, a bias keeps its order in memory, and fused kernels on CUDA read no other."""
    width = 16 if case == "path" else 8
    query, key = torch.randn(rows, 4, N, 8).double(), torch.randn(rows, 2, N, width).double()
    ids = torch.arange(N).repeat(rows, 1)
    visible = torch.ones(rows, 1, N, N, dtype=torch.bool).tril()
    bias, _, _ = bias_of(case, {}, query, key, ids, visible)
    assert bias.shape == (rows, 4, N, N)
    assert bias.stride(-1) == 1


@pytest.mark.parametrize("inputs", ["packed", "window", "left padding", "nothing"])
def test_masks_in_rows_are_dense_masks(inputs, monkeypatch):
    model = build("t5", attn_implementation="sdpa", **({"sliding_window": 4} if inputs == "window" else {}))
    tokens = draw_tokens(2, 64)
    given = {}
    if inputs == "packed":
        given["segment_ids"] = torch.arange(64).expand(2, -1) // torch.tensor([[7], [19]])
    if inputs == "left padding":
        given["attention_mask"] = torch.ones_like(tokens)
        given["attention_mask"][1, :5] = 0
    with torch.no_grad():
        expected = model(tokens, **given).logits
        monkeypatch.setattr(model_masks, "MAX_MASK_BYTES", 100)
        whole = model(tokens, **given).logits
        for limit in ("MAX_BIAS_BYTES", "BLOCK_BIAS_BYTES"):
            monkeypatch.setattr(core, limit, 8 * copies_of(model) * 2 * 4 * 64 * 2)
        with LargestTensor() as largest:
            in_blocks = model(tokens, **given).logits
    assert largest.count < 2 * 64 * 64, "a mask of all tokens"
    real = given.get("attention_mask", torch.ones_like(tokens))[..., None]
    assert gap(whole * real, expected * real) < 1e-12
    assert gap(in_blocks * real, expected * real) < 1e-12


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("case", ["t5", "fire", "cope", "path"])
def test_memory_of_a_bias(case, trains, monkeypatch):
    """As much as `bias_copies` says where it is made at once; in blocks it grows linearly, the mask included."""

    def peak(length):
        model = build(case, dtype=torch.float32, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8)
        with PeakMemory() as memory, torch.set_grad_enabled(trains):
            loss = model(draw_tokens(1, length), use_cache=False, logits_to_keep=1).logits.sum()
            if trains:
                loss.backward()
        return memory.bytes, copies_of(model) * 8 * length**2 * 4

    found, expected = peak(96)
    assert 0.4 * expected < found < 1.4 * expected
    monkeypatch.setattr(core, "MAX_BIAS_BYTES", expected / 2)
    monkeypatch.setattr(core, "BLOCK_BIAS_BYTES", expected / 8)
    monkeypatch.setattr(model_masks, "MAX_MASK_BYTES", 2**10)
    short, long = peak(96)[0], peak(192)[0]
    assert short < 0.9 * found
    assert long < 2.1 * short
