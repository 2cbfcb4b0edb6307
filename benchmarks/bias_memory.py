"""Memory of one layer with an encoding that biases scores, counted on the CPU: forward, and with backward.

    python benchmarks/bias_memory.py --encoding fire --encoding cope --length 2048

The layer has 12 heads of 16 channels, float32, one sequence, sdpa. Counted are results of torch's operators, not what
is inside a fused kernel.
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equitape import EquitapeConfig, EquitapeForCausalLM

HEADS, WIDTH = 12, 16


class PeakMemory(TorchDispatchMode):
    """Records the largest number of bytes that results of operators held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.bytes = max(self.bytes, sum(size for _, size in self._held.values()))
        return result


def peaks(encoding, length):
    """MiB without and with gradients."""
    config = EquitapeConfig(
        vocab_size=64, hidden_size=HEADS * WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=HEADS,
        max_position_embeddings=length, encoding=encoding,
    )  # fmt: skip
    model = EquitapeForCausalLM(config)
    tokens = torch.randint(64, (1, length))
    for trains in (False, True):
        with PeakMemory() as memory, torch.set_grad_enabled(trains):
            loss = model(tokens, use_cache=False, logits_to_keep=1).logits.sum()
            if trains:
                loss.backward()
        yield memory.bytes / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoding", action="append", required=True)
    parser.add_argument("--length", type=int, default=2048)
    given = parser.parse_args()
    scores = HEADS * given.length**2 * 4 / 2**20
    for encoding in given.encoding:
        forward, both = peaks(encoding, given.length)
        print(
            f"{encoding}, {given.length} tokens: forward {forward:.0f} MiB, with backward {both:.0f} MiB, one bias "
            f"{scores:.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
