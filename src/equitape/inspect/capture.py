"""Capture state, attention and mixing of every layer during a forward pass, one layer at a time.

Nothing is stored here: the attention of a long text in all layers would be larger than the model.

Shapes: N tokens, H query heads, G key-value heads, E width of the state, I mixer size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..encodings import LayerEncoding, PositionalEncoding
from ..encodings.base import HookedModule
from ..encodings.tensor_tape import TensorTape
from ..kernels.reference import mixing_matrices
from ..model import EquitapeModel


class LayerRecord(NamedTuple):
    """The record of one layer for one sequence."""

    state: Tensor | None
    """[G, N, E]: the state that rotated queries and keys; None for encodings without a state per token."""
    attention: Tensor
    """[H, N, N]."""
    mixing: Tensor | None
    """[N, G, G]: the matrices T of its tokens, complex if the weights are; None without mixing."""


def decoder_of(model: Any) -> EquitapeModel:
    """The decoder inside an Equitape model; raises ValueError for other classes."""
    decoder = getattr(model, "base_model", model)
    if not isinstance(decoder, EquitapeModel):
        raise ValueError(
            f"The model is a {type(model).__name__}; inspecting needs an Equitape model, for example one made from it "
            f"by equitape.adapt."
        )
    return decoder


def layer_encodings(model: Any) -> list[LayerEncoding]:
    """The encoding's modules in the blocks."""
    blocks: Any = decoder_of(model).layers
    return [block.self_attn.encoding for block in blocks]


def has_token_state(encoding: PositionalEncoding) -> bool:
    """Whether the state has an entry per token: phasors, or TensorTape's tensors."""
    return encoding.has_field or isinstance(encoding, TensorTape)


def updates_state(model: Any) -> bool:
    """Whether any block updates the state."""
    return any(type(part).update is not LayerEncoding.update for part in layer_encodings(model))


@contextmanager
def frozen_state(model: Any) -> Iterator[None]:
    """Freeze the initial state in all layers. For TAPE initialised as RoPE, this is a RoPE model with the same
    weights.
    """
    parts = layer_encodings(model)

    def keep(state: Tensor | None, *rest: Any) -> Tensor | None:
        return state

    def carry_nothing(state: Tensor | None) -> None:
        return None

    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(replaced_hook(part, "update", keep))
            stack.enter_context(replaced_hook(part, "extra_values", carry_nothing))
        yield


@contextmanager
def replaced_hook(owner: HookedModule, name: str, hook: Callable[..., Any]) -> Iterator[None]:
    """Temporarily override a hook of one encoding instance."""
    before = vars(owner).get(name)
    setattr(owner, name, hook)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


@contextmanager
def eager_evaluation(model: Any) -> Iterator[None]:
    """Evaluation mode with an attention that returns its weights; both are restored."""
    training, implementation = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
        model.train(training)


@torch.no_grad()
def visit_layers(
    model: Any, input_ids: Tensor, visit: Callable[[int, LayerRecord], None], position_ids: Tensor | None = None
) -> None:
    """Run one sequence [1, N] and call visit(index, record) after every application of a block."""
    decoder = decoder_of(model)
    watcher = Watcher(decoder, visit)
    with eager_evaluation(decoder), watcher:
        decoder(input_ids.to(decoder.device), position_ids=position_ids, use_cache=False)


class Watcher(ExitStack):
    """Hooks on all blocks of a decoder while the context is active."""

    def __init__(self, decoder: EquitapeModel, visit: Callable[[int, LayerRecord], None]):
        super().__init__()
        self.decoder = decoder
        self.visit = visit
        self.index = 0
        self.found: dict[str, Any] = {}

    def __enter__(self) -> "Watcher":
        blocks: Any = self.decoder.layers
        for block in blocks:
            self._keep(block.register_forward_pre_hook(self._begin))
            self._keep(block.self_attn.register_forward_hook(self._attended))
            gate = getattr(block.self_attn.encoding, "gate", None)
            if gate is not None:
                self._keep(gate.register_forward_hook(self._gated))
            self._keep(block.register_forward_hook(self._finish))
        return self

    def _keep(self, handle: Any) -> None:
        self.callback(handle.remove)

    def _begin(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.found = {"state": inputs[1]}

    def _attended(self, attention: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        self.found["attention"] = outputs[1]

    def _gated(self, gate: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.found["gate"] = output

    def _finish(self, block: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        encoding = self.decoder.encoding
        state = None
        if has_token_state(encoding):
            state = self.found["state"][0].expand(encoding.geometry.num_kv_heads, -1, -1)
        mixing = None
        if "gate" in self.found:
            part = block.self_attn.encoding
            mixing = mixing_matrices(nn.functional.silu(self.found["gate"]), part.mix_in, part.mix_out)
            wide = mixing.to(torch.promote_types(mixing.dtype, torch.float32))
            mixing = wide[0] if wide.dim() == 4 else torch.complex(*wide[:, 0])
        self.visit(self.index, LayerRecord(state, self.found["attention"][0], mixing))
        self.index += 1
        self.found = {}
