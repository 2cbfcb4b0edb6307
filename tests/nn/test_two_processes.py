"""Models of standalone layers in two processes, with sharded (FSDP2) and with replicated weights (DDP)."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cases import gap, randomise
from equitape.nn import Attention, PositionalLayer, TapeAttention, make_encoding
from processes import run_processes

WIDTH, HEADS, LAYERS, TOKENS = 32, 4, 3, 6


class Block(nn.Module):
    """A block whose update reads what its feed-forward layer reads."""

    def __init__(self, attention):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention
        self.feed_forward = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, state):
        y, state = self.attention(self.before(x), state, features=lambda y: self.after(x + y))
        x = x + y
        return x + self.feed_forward(self.after(x)), state


class OwnAttention(nn.Module):
    """Projections and an attention call of the user's own."""

    def __init__(self, layer):
        super().__init__()
        self.tape = PositionalLayer(WIDTH, HEADS, layer=layer, num_layers=LAYERS)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, state, features):
        if state is None:
            state = self.tape.initial_state(torch.arange(x.shape[1]), x.dtype)
        query, key, value = self.project(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        query, key = self.tape.apply_rotary(query, key, state)
        wide = self.tape.widen(value, state)
        output, carried = self.tape.split(scaled_dot_product_attention(query, key, wide, is_causal=True))
        output = output.transpose(1, 2).flatten(2)
        return output, self.tape.update(state, carried, features(output))


class Model(nn.Module):
    """kind: "endless" does not know its last layer."""

    def __init__(self, kind):
        super().__init__()
        if kind == "shared":
            self.encoding = make_encoding("t5", WIDTH, HEADS, LAYERS)
            layers = [Attention(WIDTH, HEADS, self.encoding, layer=index) for index in range(LAYERS)]
        elif kind == "pieces":
            layers = [OwnAttention(index) for index in range(LAYERS)]
        else:
            options = {} if kind == "endless" else {"num_layers": LAYERS}
            layers = [TapeAttention(WIDTH, HEADS, layer=index, **options) for index in range(LAYERS)]
        self.blocks = nn.ModuleList(Block(layer) for layer in layers)

    def forward(self, x):
        state = None
        for block in self.blocks:
            x, state = checkpoint(block, x, state, use_reentrant=False)
        return x


def build(kind):
    with torch.random.fork_rng(devices=[]):
        model = Model(kind)
    randomise(model)
    return model.double()


def loss_of(model, rank):
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return model(x).square().mean()


def mean_gradients(kind):
    """Of both processes' data, in one process."""
    model = build(kind)
    ((loss_of(model, 0) + loss_of(model, 1)) / 2).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def two_steps(model, rank):
    """With DDP, a weight that got no gradient makes the second step fail."""
    for _ in range(2):
        model.zero_grad()
        loss_of(model, rank).backward()


def train_one_step(kinds, expected):
    rank, mesh = distributed.get_rank(), init_device_mesh("cpu", (2,))
    for kind in kinds:
        model = build(kind)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss_of(model, rank).backward()
        for name, weight in model.named_parameters():
            assert gap(weight.grad.full_tensor(), expected[kind][name]) < 1e-12, (kind, name)
    model = DistributedDataParallel(build("tape"))
    two_steps(model, rank)
    for name, weight in model.module.named_parameters():
        assert gap(weight.grad, expected["tape"][name]) < 1e-12, name
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        two_steps(DistributedDataParallel(build("endless")), rank)


@pytest.mark.filterwarnings("ignore")
def test_two_processes_have_the_gradients_of_one():
    kinds = ("tape", "pieces", "shared")
    run_processes(2, train_one_step, kinds, {kind: mean_gradients(kind) for kind in kinds})
