"""Capture state, attention and mixing of every layer during a forward pass, one layer at a time.

Nothing is stored here: the attention of a long text in all layers would be larger than the model.

Shapes: N tokens, H query heads, G key-value heads, E width of the state, I mixer size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..encodings import LayerEncoding, PositionalEncoding
from ..encodings.tensor_tape import TensorTape
from ..kernels.reference import mixing_matrices
from ..model import EquitapeModel
from ..nn import Attention
from ..nn.core import Attended, AttentionCore
from ..nn.protocol import Measurable, attention_layers

AT_START = "The state update is zero, as at the start of training, so this is still a RoPE model."
"""What `is_at_start` means."""


class LayerRecord(NamedTuple):
    """The record of one layer for one sequence."""

    state: Tensor | None
    """[G, N, E]: the state that rotated queries and keys; None for encodings without a state per token, and in layers
    with an encoding of their own, as Gemma's with a window, whose state starts elsewhere and never changes.
    """
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
            f"by equitape.adapt, or a module with layers of equitape.nn and a method `sample`."
        )
    return decoder


@dataclass(frozen=True)
class Target:
    """A model to look into: a decoder of ours, or a module built from equitape.nn."""

    model: nn.Module
    attentions: list[AttentionCore]
    encoding: PositionalEncoding
    run: Callable[[Tensor, Tensor | None], Any]
    """Runs an input at given ids; None: the default ones."""
    use: Callable[[str], None]
    """Chooses the attention implementation."""
    local_layers: frozenset[int] = frozenset()
    """Layers with an encoding of their own."""

    @property
    def causal(self) -> bool:
        return all(attention.is_causal for attention in self.attentions)


def target_of(model: Any) -> Target:
    """A model as a target; raises ValueError for models of other classes."""
    if isinstance(model, PreTrainedModel) or not isinstance(model, Measurable):
        decoder = decoder_of(model)

        def run(inputs: Tensor, ids: Tensor | None) -> Any:
            return decoder(inputs.to(decoder.device), position_ids=ids, use_cache=False)

        own = (decoder.set_attn_implementation, decoder.local_layers)
        return Target(decoder, attention_layers(decoder), decoder.encoding, run, *own)
    assert isinstance(model, nn.Module)
    layers = [layer for layer in attention_layers(model) if isinstance(layer, Attention)]
    if not layers:
        raise ValueError(f"The model {type(model).__name__} has no attention layer of equitape.nn.")

    def choose(implementation: str) -> None:
        for layer in layers:
            layer.implementation = implementation

    encoding = next((layer.model_encoding for layer in layers if layer.state_changes), layers[0].model_encoding)

    def run_at(inputs: Tensor, ids: Tensor | None) -> Any:
        assert ids is not None
        return model(inputs, ids)

    return Target(model, list(layers), encoding, run_at, choose)


def layer_encodings(model: Any) -> list[LayerEncoding]:
    """The encoding's modules in the blocks."""
    return [attention.encoding for attention in target_of(model).attentions]


def has_token_state(encoding: PositionalEncoding) -> bool:
    """Whether the state has an entry per token: phasors, or TensorTape's tensors."""
    return encoding.has_field or isinstance(encoding, TensorTape)


def update_weights(model: Any) -> list[Tensor]:
    """The output weights of everything that is moved, carried or mixed."""
    weights = (
        getattr(part, name, None) for part in layer_encodings(model) for name in ("move_gain", "carry", "mix_out")
    )
    return [weight for weight in weights if weight is not None]


def is_at_start(model: Any) -> bool:
    """Whether nothing is moved, carried or mixed yet, because all weights that would are zero."""
    weights = update_weights(model)
    return bool(weights) and not any(bool(weight.any()) for weight in weights)


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
def replaced_hook(owner: nn.Module, name: str, hook: Callable[..., Any]) -> Iterator[None]:
    """Temporarily override a method of one instance."""
    before = vars(owner).get(name)
    setattr(owner, name, hook)
    try:
        yield
    finally:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


@contextmanager
def eager_evaluation(target: Target) -> Iterator[None]:
    """Evaluation mode with an attention that returns its weights; both are restored."""
    training, implementation = target.model.training, target.attentions[0].implementation
    target.model.eval()
    target.use("eager")
    try:
        yield
    finally:
        target.use(implementation)
        target.model.train(training)


@torch.no_grad()
def visit_layers(
    model: Any, inputs: Tensor, visit: Callable[[int, LayerRecord], None], position_ids: Tensor | None = None
) -> None:
    """Run one sequence, tokens [1, N] or any input of a module, and call visit(index, record) for every attention."""
    target = target_of(model)
    with eager_evaluation(target), Watcher(target, visit) as watcher:
        target.run(inputs, position_ids)
        watcher.finish()


class Watcher(ExitStack):
    """Records every attention of a model while the context is active.

    An update follows its attention, so a record is complete when the next attention begins, or the run ends.
    """

    def __init__(self, target: Target, visit: Callable[[int, LayerRecord], None]):
        super().__init__()
        self.target = target
        self.visit = visit
        self.index = 0
        self.found: dict[str, Any] = {}

    def __enter__(self) -> "Watcher":
        for attention in self.target.attentions:
            self.enter_context(replaced_hook(attention, "attend", self._recorded(attention)))
            gate = getattr(attention.encoding, "gate", None)
            if gate is not None:
                self.callback(gate.register_forward_hook(self._gated).remove)
        return self

    def _recorded(self, attention: AttentionCore) -> Callable[..., Attended]:
        attend = attention.attend

        def record(hidden: Tensor, state: Tensor | None, *inputs: Any, **kwargs: Any) -> Attended:
            self.finish()
            found = attend(hidden, state, *inputs, **kwargs)
            self.found = {"state": state, "attention": found.weights, "part": attention.encoding}
            return found

        return record

    def _gated(self, gate: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self.found["gate"] = output

    def finish(self) -> None:
        """Pass on the record of the last attention."""
        if not self.found:
            return
        found, self.found = self.found, {}
        encoding = self.target.encoding
        state = None
        if has_token_state(encoding) and self.index not in self.target.local_layers:
            state = encoding.field(found["state"])[0].expand(encoding.geometry.num_kv_heads, -1, -1)
        mixing = None
        if "gate" in found:
            part = found["part"]
            mixing = mixing_matrices(nn.functional.silu(found["gate"]), part.mix_in, part.mix_out)
            wide = mixing.to(torch.promote_types(mixing.dtype, torch.float32))
            mixing = wide[0] if wide.dim() == 4 else torch.complex(*wide[0].unbind(1))
        self.visit(self.index, LayerRecord(state, found["attention"][0], mixing))
        self.index += 1
