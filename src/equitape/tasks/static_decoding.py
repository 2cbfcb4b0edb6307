"""Greedy decoding with static shapes, capturable as a CUDA graph.

A step that is launched kernel by kernel waits for the host: with a small model, ten times as long as the GPU takes. One
that never changes is captured as a CUDA graph and replayed for every token. All that a token changes is therefore on
the device and changed by the step itself; the host looks at what was written every few tokens. Shapes: B prompts, N
tokens of the longest, T tokens to write, K keys (at least N + T), H key-value heads, D width of a key or value, V
vocabulary.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, StaticCache, StoppingCriteria
from transformers.cache_utils import StaticLayer

from ..cuda_graph import CaptureError, capture
from .evaluated_model import EvaluatedModel, Writing
from .perplexity import unwrap

PLAIN_STEPS = 2
"""Plain steps before a capture: the first loads kernels, and answers that end at once need no capture."""
FEWEST_TOKENS = 8
"""Answers shorter than this are not worth a capture. The host launches everything once more for it, which takes a
plain step; the graph and its memory take two more, by estimate (benchmarks/cached_decode.py measures it). After the
plain steps that leaves a gain from the sixth token on, and one that matters a little later."""
READ_EVERY = 8
"""Tokens between checks by the host: few, since a batch may be done; not one, since the GPU would wait."""
ROUND_KEYS = 64
MASKED = ("sdpa", "eager")
"""Attention implementations that accept a prepared mask."""
TOLERANCE = 0.2
"""Of logits about their mean, by norm. In bfloat16 SmolLM2, with adapters or without, errs by 0.04 to 0.09; by a wrong
position or mask by more than 0.5."""


def aligned_length(num_tokens: int) -> int:
    """Length of a static cache for these tokens; attention kernels need aligned mask rows."""
    return -(-num_tokens // ROUND_KEYS) * ROUND_KEYS


class FixedLayer(StaticLayer):
    """transformers' layer of fixed size, except that all layers write where one shared number says.

    keys: [B, H, K, D]; values likewise, but for D; place: [1] int64.
    """

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor):
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.place = keys, values, place
        self.cumulative_length = place[0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values


def prefill(model: Any, rows: list[Tensor], num_keys: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every layer, [B, H, K, D], from all tokens of the prompts but the last of each.

    Prompts are aligned so that the last token read is in the same column for all; what no prompt fills is zero. Prompts
    of one length run as one batch, others one by one. Logits are computed for one token only.
    """
    few = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    longest = max(len(row) for row in rows) - 1
    one_length = all(len(row) == longest + 1 for row in rows)
    parts = [torch.stack(rows)] if one_length else [row[None] for row in rows]
    layers: list[tuple[Tensor, Tensor]] = []
    start = 0
    for part in parts:
        grown = model(input_ids=part[:, :-1], use_cache=True, **few).past_key_values.layers
        where = (slice(start, start + len(part)), slice(None), slice(longest - part.shape[1] + 1, longest))
        start += len(part)
        for index, layer in enumerate(grown):
            if index == len(layers):
                keys, values = (
                    each.new_zeros(len(rows), each.shape[1], num_keys, each.shape[3])
                    for each in (layer.keys, layer.values)
                )
                layers.append((keys, values))
            layers[index][0][where] = layer.keys
            layers[index][1][where] = layer.values
            # at most one layer, or one of several prompts, is in memory twice
            layer.keys = layer.values = None
    return layers


class Writer:
    """Answers in progress: every step reads one token per prompt and appends the most likely next one."""

    def __init__(self, model: Any, rows: list[Tensor], new_tokens: int):
        device = rows[0].device
        longest = max(len(row) for row in rows)
        lengths = torch.tensor([len(row) for row in rows], device=device)[:, None]
        num_keys = aligned_length(longest + new_tokens)
        self.model = model
        self.token = torch.stack([row[-1:] for row in rows])
        """[B, 1], the next input."""
        self.ids = lengths - 1
        """[B, 1], its position."""
        self.place = torch.tensor([longest - 1], device=device)
        """[1], its column among the keys."""
        layers = prefill(model, rows, num_keys)
        self.cache = Cache(layers=[FixedLayer(keys, values, self.place) for keys, values in layers])
        # additive, or attention would convert it in every layer; 4D, which is used as given
        dtype = layers[0][0].dtype
        column = torch.arange(num_keys, device=device)
        hidden = (column < longest - lengths) | (column >= longest - 1)
        self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)[:, None, None]
        """[B, 1, 1, K], 0 for visible keys."""
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        """[1], number of generated tokens."""
        self.written = torch.zeros(len(rows), new_tokens, dtype=torch.long, device=device)
        """[B, T]"""

    def step(self) -> Tensor:
        """The logits of the next token [B, V]; also prepares the following step."""
        self.mask.index_fill_(3, self.place, 0.0)
        output = self.model(
            input_ids=self.token,
            attention_mask=self.mask,
            position_ids=self.ids,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits = output.logits[:, -1].float()
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.written.index_copy_(1, self.count, self.token)
        for number in (self.ids, self.place, self.count):
            number.add_(1)
        return logits


class Answers:
    """Collects the output of transformers' generate from tokens that are checked in chunks."""

    def __init__(self, prompts: Tensor, new_tokens: int, ends: list[int], padding: int, stop: StoppingCriteria | None):
        self.start = self.end = prompts.shape[1]
        self.tokens = nn.functional.pad(prompts.cpu(), (0, new_tokens))
        self.ends = torch.tensor(ends, dtype=torch.long)
        self.padding, self.stop = padding, stop
        self.unfinished = torch.ones(len(prompts), dtype=torch.bool)

    def add(self, written: Tensor) -> bool:
        """Add generated tokens [B, any]; returns whether more are needed."""
        for newest in written.cpu().unbind(1):
            # as in generate: without end tokens, text after a stop is kept
            kept = torch.where(self.unfinished, newest, self.padding) if len(self.ends) else newest
            self.tokens[:, self.end] = kept
            self.end += 1
            self.unfinished &= ~torch.isin(kept, self.ends)
            if self.stop is not None:
                self.unfinished &= ~self.stop(self.tokens[:, : self.end], None)
            if not self.unfinished.any():
                return False
        return self.end < self.tokens.shape[1]

    def tolist(self) -> list[list[int]]:
        return self.tokens[:, self.start : self.end].tolist()


def write_in_steps(
    evaluated: EvaluatedModel, rows: list[Tensor], answers: Answers, new_tokens: int, captured: bool
) -> None:
    """Decode until all answers ended or are full. captured: replay the step as a CUDA graph if possible."""
    writer = Writer(evaluated.model, rows, new_tokens)
    step: Callable[[], Tensor] = writer.step
    done, wanted = 0, min(PLAIN_STEPS, new_tokens)
    while True:
        for _ in range(wanted):
            step()
        if not answers.add(writer.written[:, done : done + wanted]):
            return
        if captured and done == 0:
            try:
                step = capture(writer.step, evaluated.device)
            except CaptureError as error:
                # nothing has run yet, so these answers continue with plain steps; later ones use generate
                evaluated.writing = "generate"
                warnings.warn(
                    f"A step of {evaluated.name!r} cannot be captured as a CUDA graph, so decoding is slower: {error}",
                    stacklevel=4,
                )
        done += wanted
        wanted = min(READ_EVERY, new_tokens - done)


def choose_writing(evaluated: EvaluatedModel, lengths: list[int], new_tokens: int) -> Writing:
    """How to decode prompts of these lengths. The first time on CUDA, this tests the model."""
    on_cuda = evaluated.device.type == "cuda"
    if not evaluated.uses_cache or min(lengths) < 2 or (evaluated.writing is None and not on_cuda):
        return "generate"
    if evaluated.writing != "steps" and new_tokens < FEWEST_TOKENS:
        return "generate"
    if evaluated.writing is None:
        evaluated.writing = "graph" if takes_steps(evaluated) else "generate"
    return evaluated.writing if max(lengths) + new_tokens <= reach(evaluated) else "generate"


def reach(evaluated: EvaluatedModel) -> float:
    """Length that the model certainly supports: captured steps and steps past the end check nothing."""
    model = unwrap(evaluated.model)
    words = set(model.get_input_embeddings().modules())
    rows = []
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module not in words:
            rows.append(module.num_embeddings)
        # tables and masks of the full context
        held = [*module.buffers(recurse=False), *(each for each in vars(module).values() if isinstance(each, Tensor))]
        rows += [size for each in held if each.dim() > 1 for size in each.shape if size == evaluated.context]
    return min([*rows, evaluated.context or torch.inf]) if rows else torch.inf


@torch.no_grad()
def takes_steps(evaluated: EvaluatedModel) -> bool:
    """Test a model: do two prompts, continued by two steps, get the same logits as in one forward pass?"""
    model = unwrap(evaluated.model)
    # transformers' flag that a step depends on nothing that only the host knows
    if not (evaluated.mixes_lengths and getattr(model, "_can_compile_fullgraph", False)):
        return False
    if model.config._attn_implementation not in MASKED:
        return False
    apart = evaluated.vocab_size // 8
    rows = [apart * torch.arange(1, length + 1, device=evaluated.device) for length in (6, 3)]
    try:
        if any(type(layer) is not StaticLayer for layer in StaticCache(config=model.config, max_cache_len=1).layers):
            return False
        writer = Writer(evaluated.model, rows, 2)
        found = torch.stack([writer.step(), writer.step()], dim=1)
        read = [torch.cat((row, new[:1])) for row, new in zip(rows, writer.written, strict=True)]
        wanted = torch.cat(
            [evaluated.model(input_ids=row[None], use_cache=False).logits[:, -2:].float() for row in read]
        )
    except torch.OutOfMemoryError:
        raise
    except Exception:
        # any obstacle to static steps: use generate
        return False
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
    return bool(((found - wanted).norm(dim=-1) < TOLERANCE * spread).all())
