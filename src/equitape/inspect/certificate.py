"""A numeric certificate: does a checkpoint keep the guarantees of its positional encoding?

Every check compares two ways to compute the same logits. The error is the largest difference over the spread (standard
deviation) of the logits; NaN and infinity count as infinite. Properties that an encoding does not guarantee are
measured and reported, but cannot fail.

Shapes: B batch, N tokens.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..model import EquitapeModel
from ..nn import Measurable
from .module_certificate import ModuleChecker
from .verdicts import (
    FAIL,
    LIMITS,
    NO_PHASORS,
    NOT_APPLICABLE,
    OFFSETS,
    Certificate,
    Check,
    Judge,
    find_turn,
    not_applicable,
    turned_start,
)  # fmt: skip

ONE_TOKEN = "The model takes only one token, so there is none before or after it."
RANDOM_POSITIONS = "Positions are drawn at random."
ROWS = 2
LEAST_TOKENS = 8
"""Fewer tokens are used only if a model takes no more."""
REFUSALS = (ValueError, IndexError)
FOREIGN_REFUSALS = (*REFUSALS, RuntimeError)
"""Errors for an id beyond a position table: ours, and PyTorch's various ones for other models."""


def certify(model: Any, num_tokens: int = 32, seed: int = 0) -> Certificate:
    """Check shifts, rotations, causality, cache, padding and packing on random tokens, in the model's dtype.

    Works for causal language models of any class that take position ids; Equitape models are also rotated frequency by
    frequency. float64 (`model.double()`) separates broken guarantees from rounding best. A model whose position table
    is too short for num_tokens is checked on as many tokens as fit. A module built from equitape.nn
    (`equitape.nn.Measurable`) is shifted along every axis and rotated.
    """
    dtype = next(model.parameters()).dtype
    if dtype not in LIMITS:
        raise ValueError(
            f"The model is in {dtype}, which is too imprecise for a certificate; use model.float() or double()."
        )
    if num_tokens < LEAST_TOKENS:
        raise ValueError(f"num_tokens is {num_tokens}; it must be {LEAST_TOKENS} or more.")
    training = model.training
    model.eval()
    try:
        checker = ModuleChecker if is_module(model) else Checker
        return checker(model, num_tokens, seed, LIMITS[dtype]).certify()
    finally:
        model.train(training)


def is_module(model: Any) -> bool:
    """Whether a model is a module built from equitape.nn, not one of transformers' classes."""
    return isinstance(model, Measurable) and not isinstance(model, PreTrainedModel)


def room_for(model: Any, num_tokens: int) -> tuple[int, str]:
    """(tokens to check, the reason if fewer than requested, or "").

    Found by trying, since model classes do not report which ids they take. One id is left unused if there are two, so
    that a shift by one can be measured.
    """
    refusal = refusal_of(model, num_tokens + 1)
    if refusal is None:
        return num_tokens, ""
    taken, refused = 0, num_tokens + 1
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if refusal_of(model, middle) is None:
            taken = middle
        else:
            refused = middle
    if taken == 0:
        # the error is not about length
        if isinstance(refusal, RuntimeError):
            dtype, message = str(next(model.parameters()).dtype), str(refusal).partition("\n")[0].rstrip(".")
            raise ValueError(
                f"The model does not run in {dtype.removeprefix('torch.')} ({message}); try another dtype."
            ) from refusal
        raise refusal
    kept = max(1, taken - 1)
    return kept, f"The model takes at most {taken} tokens, so the checks used {kept} instead of {num_tokens}."


def refusal_of(model: Any, num_tokens: int) -> Exception | None:
    """The model's error for a text of this length, or None."""
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros((1, num_tokens), dtype=torch.long, device=model.device), use_cache=False)
    except refusals_of(model) as refusal:
        return refusal
    return None


def refusals_of(model: Any) -> tuple[type[Exception], ...]:
    """The errors by which a model rejects ids; any other error of an Equitape model is a bug."""
    return REFUSALS if isinstance(getattr(model, "base_model", model), EquitapeModel) else FOREIGN_REFUSALS


class Checker(Judge):
    """The checks of a causal language model, on one set of random tokens."""

    names = ("shift", "rotation", "causality", "cache", "padding", "packing")
    what = "logits"

    def __init__(self, model: Any, num_tokens: int, seed: int, limit: float):
        num_tokens, self.cut = room_for(model, num_tokens)
        decoder = getattr(model, "base_model", model)
        self.model = model
        self.encoding = decoder.encoding if isinstance(decoder, EquitapeModel) else None
        self.limit = limit
        generator = torch.Generator().manual_seed(seed)
        vocabulary = model.config.get_text_config().vocab_size
        self.drawn = torch.randint(0, vocabulary, (ROWS, 2 * num_tokens), generator=generator).to(model.device)
        self.tokens = self.drawn[:, :num_tokens]
        self.num_tokens = num_tokens
        self.expected = self.logits(self.tokens)
        self.spread = float(self.expected.double().std())
        other = self.logits(self.tokens, seed=1)
        self.is_random = bool(torch.isfinite(other).all()) and not torch.equal(other, self.expected)

    @torch.no_grad()
    def logits(self, tokens: Tensor, seed: int = 0, **inputs: Any) -> Tensor:
        """[B, N, vocabulary]; encodings that draw positions draw the same ones for the same seed."""
        torch.manual_seed(seed)
        return self.model(input_ids=tokens, use_cache=False, **inputs).logits

    def shift(self) -> Check:
        """All ids shifted by the same number."""
        meaning = "shifting all ids by one number changes no logit"
        errors, tried, note = [], [], ""
        for offset in OFFSETS:
            ids = torch.arange(offset, offset + self.num_tokens, device=self.tokens.device)[None].expand(ROWS, -1)
            try:
                errors.append(self.error(self.logits(self.tokens, position_ids=ids), self.expected))
                tried.append(f"{offset:,}")
            except refusals_of(self.model) as refusal:
                note = f"Ids from {offset:,} are rejected: {refusal}"
                break
        promised = self.encoding is not None and self.encoding.shift_invariant
        if not errors:
            return Check(name="shift", meaning=meaning, verdict=FAIL if promised else NOT_APPLICABLE, note=note)
        if self.encoding is None:
            note = f"This model class declares nothing about shifts. {note}".strip()
        elif not promised:
            note = f"{self.encoding.kind!r} is not declared shift invariant. {note}".strip()
        return self.judge("shift", f"{meaning} (by {', '.join(tried)})", errors, promised, note)

    def rotation(self) -> Check:
        """The phasors of every frequency rotated by one angle per frequency, for all tokens."""
        name, meaning = "rotation", "rotating all phasors of a frequency by one angle changes no logit"
        turn = None if self.encoding is None else find_turn(self.encoding)
        if self.encoding is None or turn is None:
            return not_applicable(name, meaning, NO_PHASORS)
        with turned_start(self.encoding, turn):
            errors = [self.error(self.logits(self.tokens), self.expected)]
        note = "" if self.encoding.shift_invariant else "Not declared equivariant."
        if self.encoding.has_field:
            meaning += ", and rotates every layer's state by it"
            errors.append(self.state_error(turn))
        return self.judge(name, meaning, errors, self.encoding.shift_invariant, note)

    @torch.no_grad()
    def state_error(self, turn: Callable[[Tensor], Tensor]) -> float:
        """Largest relative difference between rotated states and states from a rotated initial state."""
        assert self.encoding is not None

        def states() -> tuple[Tensor, ...]:
            torch.manual_seed(0)
            return self.model(input_ids=self.tokens, use_cache=False, output_position_states=True).position_states

        plain = states()
        with turned_start(self.encoding, turn):
            found = states()
        gaps = [
            float((ours - turn(theirs)).abs().max() / theirs.abs().max())
            for ours, theirs in zip(found, plain, strict=True)
        ]
        return max(gap if math.isfinite(gap) else math.inf for gap in gaps)

    def causality(self) -> Check:
        """Later tokens changed, and further ones appended."""
        note, meaning = "", "later tokens do not change earlier outputs"
        half = self.num_tokens // 2
        if half == 0:
            return not_applicable("causality", meaning, ONE_TOKEN)
        changed = torch.cat((self.tokens[:, :half], self.drawn[:, self.num_tokens : 2 * self.num_tokens - half]), dim=1)
        errors = [self.error(self.logits(changed)[:, :half], self.expected[:, :half])]
        if self.is_random:
            note = "Positions are drawn at random for each length, so longer texts were not tested."
        elif self.encoding is not None and not self.encoding.causal:
            note = f"{self.encoding.kind!r} declares that a longer text changes earlier outputs; this was not tested."
        else:
            # a prefix against the full text, so that no ids beyond those of the text are needed
            start = self.num_tokens - min(5, half)
            errors.append(self.error(self.logits(self.tokens[:, :start]), self.expected[:, :start]))
        return self.judge("causality", meaning, errors, note=note)

    def cache(self) -> Check:
        """A chunk, then token by token."""
        meaning = "logits with a key-value cache equal those without"
        refusal = None if self.encoding is None else self.encoding.cache_refusal
        if refusal is not None or self.is_random:
            note = f"A cache is not supported: {refusal}." if refusal else RANDOM_POSITIONS
            return not_applicable("cache", meaning, note)
        if self.num_tokens < 2:
            return not_applicable("cache", meaning, ONE_TOKEN)
        if "past_key_values" not in inspect.signature(self.model.forward).parameters:
            return not_applicable("cache", meaning, "This model class takes no key-value cache.")
        errors = []
        for first in (1, max(1, self.num_tokens - 4)):
            cache = DynamicCache(config=self.model.config)
            sizes = [first] + [1] * (min(self.num_tokens - first, 12))
            parts, start = [], 0
            with torch.no_grad():
                for size in sizes:
                    chunk = self.tokens[:, start : start + size]
                    parts.append(self.model(input_ids=chunk, past_key_values=cache, use_cache=True).logits)
                    start += size
            errors.append(self.error(torch.cat(parts, dim=1), self.expected[:, :start]))
        return self.judge("cache", meaning, errors)

    def padding(self) -> Check:
        """Padding on the left and right of one row in a batch."""
        meaning = "a padded row has the same logits as the row alone"
        if self.is_random:
            return not_applicable("padding", meaning, RANDOM_POSITIONS)
        if self.num_tokens < 2:
            return not_applicable("padding", meaning, ONE_TOKEN)
        length = max(1, self.num_tokens - 3)
        alone = self.logits(self.tokens[1:, :length])
        errors = []
        for place in (slice(self.num_tokens - length, None), slice(0, length)):
            rows, mask = self.tokens.clone(), torch.ones_like(self.tokens)
            rows[1], mask[1] = self.drawn[0, -1], 0
            rows[1, place], mask[1, place] = self.tokens[1, :length], 1
            found = self.logits(rows, attention_mask=mask, position_ids=self.counted_ids(mask))
            errors.append(self.error(found[1:, place], alone))
            errors.append(self.error(found[:1], self.expected[:1]))
        return self.judge("padding", f"{meaning} (left and right)", errors)

    def packing(self) -> Check:
        """Two texts in one row: ids and running sums start anew, and no text reads the other."""
        meaning = "texts packed into one row have the same logits as each alone"
        if self.encoding is None:
            return not_applicable("packing", meaning, "This model class takes no segment_ids.")
        if self.is_random:
            return not_applicable("packing", meaning, RANDOM_POSITIONS)
        half = self.num_tokens // 2
        if half == 0:
            return not_applicable("packing", meaning, ONE_TOKEN)
        segments = (torch.arange(self.num_tokens, device=self.tokens.device) >= half).long().expand(ROWS, -1)
        packed = self.logits(self.tokens, segment_ids=segments)
        errors = [
            self.error(packed[:, part], self.logits(self.tokens[:, part])) for part in (slice(half), slice(half, None))
        ]
        return self.judge("packing", meaning, errors)

    def counted_ids(self, mask: Tensor) -> Tensor | None:
        """Equitape models skip padding when counting ids; others get explicit ids, as in `generate`."""
        return None if self.encoding is not None else (mask.cumsum(-1) - 1).clamp(min=0)
