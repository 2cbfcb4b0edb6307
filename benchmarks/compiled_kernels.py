"""Count the kernels of one layer in a compiled pass, without a GPU.

    python benchmarks/compiled_kernels.py rope tape2 'tape2 carried_frequencies=8'
    python benchmarks/compiled_kernels.py rope tape2 --tokens 64
    python benchmarks/compiled_kernels.py rope tape2 --tokens 64 --batch 2 --train

The first counts a decoding step, the second the prefill of a prompt, the third the forward and the backward pass of a
training step. Kernels are those that torch's inductor schedules in its Triton mode. Attention and our operators count
as one kernel each, as on a GPU. A step for few sequences takes about as long as its kernels are many.
"""

import argparse
import copy
import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from transformers import StaticCache

from equitape import EquitapeConfig, EquitapeForCausalLM
from equitape.bench.subjects import parse_subject

CALLS = re.compile(r"(\w+)\.run\(|(extern_kernels\.\w+)\(|(torch\.ops\.[\w.]+)\(")


@torch.library.custom_op("equitape_counts::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention as one kernel: [B, H, N, E]. It is counted, not computed."""
    return query.new_zeros(*query.shape[:3], value.shape[-1])


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


@torch.library.custom_op("equitape_counts::attention_backward", mutates_args=())
def attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass of attention as one kernel. It is counted, not computed."""
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


@attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


attention.register_autograd(
    lambda ctx, gradient: (*attention_backward(gradient, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3]),
)


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> tuple[Tensor, None]:
    """In place of `equitape.nn.core.attend`."""
    _state, _positions, mask, _scaling = others
    return attention(query, key, value, mask.mask).transpose(1, 2), None


class CountedError(Exception):
    """Stops the compiler before it compiles what it has scheduled."""


def count_compiled(call: Callable[[], Any]) -> list[list[str]]:
    """The kernels of everything that a call compiles, one list per graph: the forward, then the backward pass."""
    sources: list[str] = []
    trains = torch.is_grad_enabled()

    def stop(graph: GraphLowering) -> None:
        sources.append(graph.codegen()[0].value)
        raise CountedError

    def compile_graph(module: Any, inputs: Any, **settings: Any) -> Any:
        known = len(sources)
        # what the compiler gets it changes; the backward pass follows only if the forward pass runs
        plain = copy.deepcopy(module) if trains else None
        try:
            compile_fx_inner(module, inputs, **settings)
        except Exception as error:
            if len(sources) == known:
                raise RuntimeError("inductor stopped before it had scheduled all kernels") from error
            if plain is None:
                raise
        assert plain is not None
        return make_boxed_func(plain.forward)

    def backend(module: Any, inputs: Any) -> Any:
        return compile_fx(module, inputs, inner_compile=compile_graph)

    torch._dynamo.reset()
    with (
        patch.dict(os.environ, EQUITAPE_KERNELS="triton"),
        patch("torch.utils._triton.triton_hash_with_backend", return_value="none"),
        patch("equitape.nn.core.attend", attend),
        # our operators are counted, not computed
        patch("equitape.kernels.operator._load", lambda kernel: lambda *tensors: None),
        patch.object(GraphLowering, "compile_to_module", stop),
        inductor.patch({"cpu_backend": "triton", "fx_graph_cache": False}),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compiled = torch.compile(call, fullgraph=True, backend=backend)
        if trains:
            compiled().backward()
        else:
            with suppress(Exception):
                compiled()
    if not sources:
        raise RuntimeError("inductor stopped before it had scheduled all kernels")
    found = [CALLS.findall(source[source.index("def call(") :]) for source in sources]
    return [[next(filter(None, names)) for names in graph] for graph in found]


def count_pass(encoding: dict[str, Any], layers: int, batch: int, tokens: int, train: bool = False) -> list[list[str]]:
    """The kernels of a pass, in order: of one token a decoding step with a static cache, of more a prompt, or with
    `train` the forward and the backward pass of a training step.
    """
    config = EquitapeConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=max(64, tokens), encoding=encoding,
    )  # fmt: skip
    model = EquitapeForCausalLM(config).to(torch.bfloat16).train(train)
    decodes = tokens == 1 and not train
    more: dict[str, Any] = {"use_cache": False} if train else {}
    if decodes:
        more["past_key_values"] = StaticCache(config=model.config, max_cache_len=64)
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    with torch.set_grad_enabled(train):
        if decodes:
            with patch("equitape.nn.core.attend", attend):
                # allocates the cache
                model(input_ids=ids, **more)
        if train:
            return count_compiled(lambda: model(input_ids=ids, **more).logits.float().sum())
        return count_compiled(lambda: model(input_ids=ids, **more).logits)


def count_layer(encoding: dict[str, Any], batch: int = 1, tokens: int = 1, train: bool = False) -> list[int]:
    """Kernels of one layer, which updates the field where the encoding has one: of each pass."""
    # the last layer never updates
    few, more = (count_pass(encoding, layers, batch, tokens, train) for layers in (3, 4))
    return [len(after) - len(before) for before, after in zip(few, more, strict=True)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encodings", nargs="+", help="name and options, as for equitape bench")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--tokens", type=int, default=1, help="tokens of a prompt; 1 is a decoding step")
    parser.add_argument("--train", action="store_true", help="count the forward and the backward pass of training")
    parser.add_argument("--kernels", action="store_true", help="name the kernels of a pass through three layers")
    given = parser.parse_args()
    try:
        encodings = [EquitapeConfig(encoding=parse_subject(name).encoding).encoding for name in given.encodings]
    except ValueError as error:
        parser.error(str(error))
    # nothing is run, only scheduled
    warnings.filterwarnings("ignore", "Could not find an active CPU backend")
    columns = "forward | backward" if given.train else "kernels per layer"
    print(f"| encoding | {columns} |\n|---{'|---' * columns.count('|')}|---|")
    shape = (given.batch, given.tokens, given.train)
    for name, encoding in zip(given.encodings, encodings, strict=True):
        print(f"| {name} | {' | '.join(map(str, count_layer(encoding, *shape)))} |")
        if given.kernels:
            print("\n".join(f"    {kernel}" for graph in count_pass(encoding, 3, *shape) for kernel in graph))


if __name__ == "__main__":
    main()
