"""Sharded weights (FSDP2) and quantization: what they need of the parameters of every encoding."""

import pytest
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import CASES, build, draw_tokens, gap

DETERMINISTIC = [case for case in CASES if "sampled" not in case]
MULTIPLE = 8
"""Quantized layers pack this many inputs at least."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("case", DETERMINISTIC)
def test_sharded_model_trains(case, mesh):
    model, tokens = build(case), draw_tokens(2, 9)
    expected = model(tokens, labels=tokens)
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    output = model(tokens, labels=tokens)
    output.loss.backward()
    assert gap(output.logits, expected.logits) < 1e-12
    for name, parameter in model.named_parameters():
        assert gap(parameter.grad.full_tensor(), gradients[name]) < 1e-12, name


@pytest.mark.parametrize("case", CASES)
def test_linear_layers_can_be_quantized(case):
    layers = [module for module in build(case).modules() if isinstance(module, nn.Linear)]
    assert all(layer.in_features % MULTIPLE == 0 for layer in layers)
