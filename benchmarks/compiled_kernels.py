"""Count the kernels of one layer in a compiled forward pass, without a GPU.

    python benchmarks/compiled_kernels.py rope tape2 'tape2 carried_frequencies=8'
    python benchmarks/compiled_kernels.py rope tape2 --tokens 64

The first counts a decoding step, the second the prefill of a prompt. Kernels are those that torch's inductor schedules
in its Triton mode. Attention and our operators count as one kernel each, as on a GPU. A step for few sequences takes
about as long as its kernels are many.
"""

import argparse
import os
import re
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from torch import Tensor
from torch._inductor import config as inductor
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


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any) -> tuple[Tensor, None]:
    """In place of `equitape.nn.core.attend`."""
    _state, _positions, mask, _scaling = others
    return attention(query, key, value, mask.mask).transpose(1, 2), None


class CountedError(Exception):
    """Stops the compiler before it compiles what it has scheduled."""


def count_pass(encoding: dict[str, Any], layers: int, batch: int, tokens: int) -> list[str]:
    """The kernels of a forward pass, in order: of one token a decoding step with a static cache, of more a prompt."""
    config = EquitapeConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=max(64, tokens), encoding=encoding,
    )  # fmt: skip
    model = EquitapeForCausalLM(config).to(torch.bfloat16).eval()
    more = {"past_key_values": StaticCache(config=model.config, max_cache_len=64)} if tokens == 1 else {}
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    sources: list[str] = []

    def stop(graph: GraphLowering) -> None:
        sources.append(graph.codegen()[0].value)
        raise CountedError

    torch._dynamo.reset()
    settings = {"cpu_backend": "triton", "fx_graph_cache": False}
    with (
        torch.no_grad(),
        patch.dict(os.environ, EQUITAPE_KERNELS="triton"),
        patch("torch.utils._triton.triton_hash_with_backend", return_value="none"),
        patch("equitape.nn.core.attend", attend),
        patch.object(GraphLowering, "compile_to_module", stop),
        inductor.patch(settings),
    ):
        # allocates the cache
        model(input_ids=ids, **more)
        try:
            torch.compile(lambda: model(input_ids=ids, **more).logits, fullgraph=True)()
        except Exception as error:
            if not sources:
                raise RuntimeError("inductor stopped before it had scheduled all kernels") from error
    (source,) = sources
    body = source[source.index("def call(") :]
    return [next(filter(None, found)) for found in CALLS.findall(body)]


def count_layer(encoding: dict[str, Any], batch: int = 1, tokens: int = 1) -> int:
    """Kernels of one layer, which updates the field where the encoding has one."""
    # the last layer never updates
    few, more = (len(count_pass(encoding, layers, batch, tokens)) for layers in (3, 4))
    return more - few


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encodings", nargs="+", help="name and options, as for equitape bench")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--tokens", type=int, default=1, help="tokens of a prompt; 1 is a decoding step")
    parser.add_argument("--kernels", action="store_true", help="name the kernels of a pass through three layers")
    given = parser.parse_args()
    print("| encoding | kernels per layer |\n|---|---|")
    for name in given.encodings:
        encoding = parse_subject(name).encoding
        print(f"| {name} | {count_layer(encoding, given.batch, given.tokens)} |")
        if given.kernels:
            print("\n".join(f"    {kernel}" for kernel in count_pass(encoding, 3, given.batch, given.tokens)))


if __name__ == "__main__":
    main()
