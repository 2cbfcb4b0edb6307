"""The certificate of a module built from equitape.nn: shifts along every axis, rotations, causality.

Shapes: B batch, N tokens, A axes.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..encodings import PositionalEncoding
from ..nn import Attention
from .capture import target_of
from .verdicts import NO_PHASORS, OFFSETS, Check, Judge, find_turn, not_applicable, turned_start


class ModuleChecker(Judge):
    """The checks of a module (`equitape.nn.Measurable`), on random input that it draws itself."""

    names = ("shift", "rotation", "causality")
    what = "outputs"
    encoding: PositionalEncoding

    def __init__(self, model: Any, num_tokens: int, seed: int, limit: float):
        target = target_of(model)
        self.model = model
        self.limit = limit
        self.causal = target.causal
        self.encoding = target.encoding
        layers = [layer for layer in target.attentions if isinstance(layer, Attention)]
        # by identity: layers may share one
        self.encodings = list({id(layer.model_encoding): layer.model_encoding for layer in layers}.values())
        self.promised = all(encoding.shift_invariant for encoding in self.encodings)
        self.inputs, self.ids = model.sample(num_tokens, torch.Generator().manual_seed(seed))
        self.other, _ = model.sample(num_tokens, torch.Generator().manual_seed(seed + 1))
        axes = self.encoding.geometry.num_axes
        if self.ids.dim() != (1 if axes == 1 else 2) or (axes > 1 and self.ids.shape[1] != axes):
            shape = "[N]" if axes == 1 else f"[N, {axes}]"
            raise ValueError(f"`sample` returned ids of shape {list(self.ids.shape)}; they must be {shape}.")
        self.num_tokens = len(self.ids)
        self.expected = self.run()
        self.spread = float(self.expected.double().std())

    @torch.no_grad()
    def run(self, inputs: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """The outputs, of the drawn input at its own ids by default."""
        found = self.model(self.inputs if inputs is None else inputs, self.ids if ids is None else ids)
        return found[0] if isinstance(found, tuple) else found

    def shift(self) -> Check:
        """All ids shifted by the same number, along one axis at a time."""
        axes = self.encoding.geometry.num_axes
        errors = []
        for axis in range(axes):
            for offset in OFFSETS:
                step = torch.zeros(axes, dtype=self.ids.dtype)
                step[axis] = offset
                errors.append(self.error(self.run(ids=self.ids + (step if axes > 1 else offset)), self.expected))
        along = f" along any of {axes} axes" if axes > 1 else ""
        tried = ", ".join(f"{offset:,}" for offset in OFFSETS)
        note = "" if self.promised else "Not all layers have an encoding that is declared shift invariant."
        meaning = f"shifting all ids by one number{along} changes no output (by {tried})"
        return self.judge("shift", meaning, errors, self.promised, note)

    def rotation(self) -> Check:
        """The phasors of every frequency rotated by one angle per frequency, for all tokens."""
        name, meaning = "rotation", "rotating all phasors of a frequency by one angle changes no output"
        turns = [(encoding, find_turn(encoding)) for encoding in self.encodings]
        with ExitStack() as stack:
            turned = [stack.enter_context(turned_start(own, turn)) for own, turn in turns if turn is not None]
            if not turned:
                return not_applicable(name, meaning, NO_PHASORS)
            return self.judge(name, meaning, [self.error(self.run(), self.expected)], self.promised)

    def causality(self) -> Check:
        """The second half of the input changed."""
        name, meaning = "causality", "later tokens do not change earlier outputs"
        count, half = len(self.ids), len(self.ids) // 2
        if not self.causal:
            return not_applicable(name, meaning, "Attention sees both directions.")
        if self.inputs.dim() < 2 or {self.inputs.shape[1], self.expected.shape[1]} != {count}:
            note = "Inputs and outputs are not [B, N, ...], so tokens cannot be distinguished."
            return not_applicable(name, meaning, note)
        changed = torch.cat((self.inputs[:, :half], self.other[:, half:]), dim=1)
        return self.judge(name, meaning, [self.error(self.run(changed)[:, :half], self.expected[:, :half])])
