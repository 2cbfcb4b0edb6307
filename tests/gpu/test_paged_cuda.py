"""generate_batch on a GPU: the compiled kernel that reads the cache in place, and its replay as a CUDA graph."""

import pytest
import torch

from batching import draw_prompts, one_by_one, serve
from cases import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("case", ["rope", "tape", "tape2-full", "tape-clock", "alibi"])
def test_tokens_are_those_of_generate(case, groups, graphs):
    model = build(case, dtype=torch.float32, hidden_size=256, num_key_value_heads=groups).cuda()
    prompts = draw_prompts()
    assert serve(model, prompts, use_cuda_graph=graphs) == one_by_one(model, prompts)


@pytest.mark.parametrize("case", ["rope", "tape2-full"])
def test_sliding_layers(case):
    """They copy what they read to PyTorch's flash kernel, in half precision only."""
    model = build(case, dtype=torch.float32, hidden_size=256, sliding_window=5, sliding_layers=[1]).cuda()
    prompts = draw_prompts()
    assert serve(model, prompts, use_cuda_graph=False) == one_by_one(model, prompts)
    assert all(len(answer) == 6 for answer in serve(model.bfloat16(), prompts, use_cuda_graph=False))
