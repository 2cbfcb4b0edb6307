"""Perplexity of long documents with sliding windows, without the logits of a whole window in memory.

A window reads `length` tokens of one document and predicts the token after each of them. Windows begin every `stride`
tokens. Which of its predictions count is the rule `score`:

- "new" (Press et al., arXiv 2108.12409): those that no earlier window of the document has made, so that every token but
  the first of a document counts once, with at least `length - stride` tokens of context after the first window. What is
  left at the end of a document is scored by one more window, moved back so that it is whole.
- "all" (the code of LongLoRA, arXiv 2309.12307, which uses a stride of 256): all of them, so that a token counts once
  for each window that reaches it, with contexts from 1 to `length`; what is left at the end is not scored. That code
  joins all documents into one first, which a caller may do too, and makes one prediction less in each window.

With `stride = length` both are the same, but for the end of the document.

Shapes: B windows, N tokens of a window, C hidden size, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..model import EquitapeForCausalLM
from ..settings import check_value

CHUNK_TOKENS = 1024
"""Maximum tokens whose logits are in memory at once."""
ScoreRule = Literal["new", "all"]


@dataclass(frozen=True, kw_only=True)
class PerplexityResult:
    """The scores of documents, and the protocol."""

    length: int
    stride: int
    score: str
    loss: float
    """Nats per scored token."""
    bits_per_byte: float | None
    """The same per byte of the documents, independent of the tokenizer; None if sizes were not given."""
    tokens: int
    """Number of scored predictions."""
    windows: int
    documents: int
    skipped_documents: int
    """Number of documents too short for one window."""
    position_losses: Tensor
    """[N] float64, mean loss at each position of a window; NaN if none was scored."""
    position_counts: Tensor
    """[N] int64, number of predictions in that mean."""

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity if it overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def position_curve(self, num_points: int = 64) -> tuple[list[float], list[float]]:
        """(tokens read, losses): means over bins of positions; bins without scored predictions are left out."""
        places, losses = [], []
        for part in torch.arange(self.length).tensor_split(min(num_points, self.length)):
            counts = self.position_counts[part]
            if int(counts.sum()):
                total = (self.position_losses[part].nan_to_num() * counts).sum() / counts.sum()
                places.append(float(part.double().mean()) + 1)
                losses.append(float(total))
        return places, losses


class Window(NamedTuple):
    """A window of a document."""

    document: int
    start: int
    """Index of its first token."""
    size: int
    """Number of tokens, and of predictions."""
    first: int
    """Its first scored prediction."""
    end: int
    """After its last scored prediction."""


Span = tuple[int, int]
"""A range of predictions of a document; prediction p is of token p + 1."""


@torch.no_grad()
def perplexity(
    model: Any,
    documents: Iterable[Tensor | Sequence[int]],
    length: int,
    stride: int | None = None,
    *,
    score: str = "new",
    document_bytes: Sequence[int] | None = None,
    keep_short: bool = False,
    max_windows: int | None = None,
    spans: Sequence[Sequence[Span]] | None = None,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> PerplexityResult:
    """Score documents, each the tokens [n] of one text, by the protocol at the top of this file.

    model: any causal language model of transformers, ours or not, wrapped by peft or not; it runs in its own dtype.
    stride: default: `length`. document_bytes: UTF-8 bytes of each document. keep_short: score documents shorter than a
    window too, each as one short window, instead of leaving them out. max_windows: take only so many windows, spread
    evenly over all; other lengths then score other tokens. spans: score only these predictions of each document, the
    same at every length (`spread_spans` and `spread_over_documents` choose some). progress: called with (windows done,
    windows in all).
    """
    tokens = [torch.as_tensor(document, dtype=torch.long) for document in documents]
    stride = length if stride is None else stride
    _check(model, tokens, length, stride, score, document_bytes)
    windows = [
        window
        for number, document in enumerate(tokens)
        for window in cut_windows(
            number, len(document), length, stride, score, keep_short, None if spans is None else spans[number]
        )
    ]
    if not windows:
        longest = max((len(document) for document in tokens), default=0)
        raise ValueError(
            f"No document has the {length + 1} tokens that a window of {length} needs (the longest has {longest}); use "
            f"longer documents or a shorter length."
        )
    if max_windows is not None and max_windows < len(windows):
        windows = [windows[index] for index in spread_evenly(len(windows), max_windows)]

    sums, counts = score_windows(model, tokens, windows, length, batch_tokens=batch_tokens, progress=progress)
    used = sorted({window.document for window in windows})
    loss = float(sums.sum() / counts.sum())
    bits_per_byte = None
    if document_bytes is not None:
        num_bytes = sum(document_bytes[number] for number in used)
        bits_per_byte = loss / math.log(2) * sum(len(tokens[number]) for number in used) / num_bytes
    return PerplexityResult(
        length=length,
        stride=stride,
        score=score,
        loss=loss,
        bits_per_byte=bits_per_byte,
        tokens=int(counts.sum()),
        windows=len(windows),
        documents=len(used),
        skipped_documents=sum(len(document) <= length for document in tokens) if not keep_short else 0,
        position_losses=sums / counts,
        position_counts=counts,
    )


@torch.no_grad()
def score_windows(
    model: Any,
    documents: Sequence[Tensor],
    windows: Sequence[Window],
    length: int,
    *,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums of losses and numbers of scored predictions by position in the window, both [length]."""
    sums = torch.zeros(length, dtype=torch.float64)
    counts = torch.zeros(length, dtype=torch.long)
    done = 0
    was_training = model.training
    model.eval()
    try:
        losses_of = choose_scorer(model, documents[windows[0].document][:8][None])
        for batch in _batches(windows, max(1, batch_tokens // length)):
            rows = torch.stack([documents[w.document][w.start : w.start + w.size + 1] for w in batch])
            rows = rows.to(_device(model))
            losses = losses_of(rows[:, :-1], rows[:, 1:]).cpu().double()
            size = losses.shape[1]
            place = torch.arange(size)
            first, end = (torch.tensor([getattr(w, name) for w in batch])[:, None] for name in ("first", "end"))
            counted = (place >= first) & (place < end)
            sums[:size] += torch.where(counted, losses, 0).sum(0)
            counts[:size] += counted.sum(0)
            done += len(batch)
            if progress is not None:
                progress(done, len(windows))
    finally:
        model.train(was_training)
    return sums, counts


def _check(
    model: Any, tokens: list[Tensor], length: int, stride: int, score: str, document_bytes: Sequence[int] | None
) -> None:
    if length < 1:
        raise ValueError(f"A window needs a length of 1 or more; it is {length}.")
    if not 1 <= stride <= length:
        raise ValueError(f"The stride must be from 1 to the length, {length}, or tokens are left out; it is {stride}.")
    check_value(score, ScoreRule, "score")
    if document_bytes is not None and len(document_bytes) != len(tokens):
        raise ValueError(
            f"document_bytes has {len(document_bytes)} entries for {len(tokens)} documents; give one for each."
        )
    largest = max((int(document.max()) for document in tokens if len(document)), default=0)
    vocabulary = unwrap(model).get_input_embeddings().weight.shape[0]
    if largest >= vocabulary:
        raise ValueError(
            f"Token {largest} is beyond the model's vocabulary of {vocabulary}; use the tokenizer it was trained with."
        )


def cut_windows(
    document: int,
    num_tokens: int,
    length: int,
    stride: int,
    score: str = "new",
    keep_short: bool = False,
    spans: Sequence[Span] | None = None,
) -> list[Window]:
    """The windows of one document and their scored predictions. spans: score only these."""
    predictions = num_tokens - 1
    if predictions < length:
        return [Window(document, 0, predictions, 0, predictions)] if keep_short and predictions > 0 else []
    windows = []
    for start, end in [(0, predictions)] if spans is None else spans:
        if score == "all":
            starts = range(start, end - length + 1, stride)
            windows += [Window(document, begin, length, 0, length) for begin in starts]
            continue
        # each prediction once, with at least `length - stride` tokens of context but at the start of the document
        while start < end:
            begin = min(max(0, start + stride - length), predictions - length)
            stop = min(begin + length, end)
            windows.append(Window(document, begin, length, start - begin, stop - begin))
            start = stop
    return windows


def spread_evenly(count: int, number: int) -> list[int]:
    """`number` indices below `count`, the first and the last among them."""
    return torch.linspace(0, count - 1, number, dtype=torch.float64).round().long().tolist()


def spread_spans(num_tokens: int, size: int, number: int | None) -> list[Span]:
    """At most `number` spans of `size` predictions that do not overlap, spread evenly over a document; None: all of it.

    Scored at lengths up to `size`, they are the same tokens at every length.
    """
    predictions = num_tokens - 1
    if number is None or number * size >= predictions:
        return [(0, predictions)]
    tiles = predictions // size
    return [(tile * size, (tile + 1) * size) for tile in spread_evenly(tiles, min(number, tiles))]


def spread_over_documents(sizes: Sequence[int], size: int, number: int | None) -> list[list[Span]]:
    """As `spread_spans`, over several documents: at most `number` spans in all, for each document its own.

    sizes: tokens of each document. Documents without `size` predictions have none. None: all predictions of the others.
    """
    tiles = [max(0, tokens - 1) // size for tokens in sizes]
    if number is None or number >= sum(tiles):
        return [[(0, tokens - 1)] if count else [] for tokens, count in zip(sizes, tiles, strict=True)]
    places = [(document, tile) for document, count in enumerate(tiles) for tile in range(count)]
    spans: list[list[Span]] = [[] for _ in sizes]
    for index in spread_evenly(len(places), number):
        document, tile = places[index]
        spans[document].append((tile * size, (tile + 1) * size))
    return spans


def _batches(windows: Sequence[Window], batch_size: int) -> Iterator[list[Window]]:
    """Batches of windows of one size, at most batch_size each."""
    for _, same in groupby(windows, key=lambda window: window.size):
        group = list(same)
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


Scorer = Callable[[Tensor, Tensor], Tensor]
"""(tokens [B, N], the token after each [B, N]) -> losses in nats [B, N], float32."""


def choose_scorer(model: Any, probe: Tensor) -> Scorer:
    """How to get a model's losses without all its logits at once.

    Most models are a decoder and a linear head, whose logits can be made in chunks from the hidden states. Some do more
    with logits (cap, scale); those show it on the probe [1, n], and run chunk by chunk through their cache instead.
    """
    model = unwrap(model)
    decoder, head = _parts(model)
    plain = isinstance(model, EquitapeForCausalLM) and model.config.logit_softcap is None
    if head is not None and (plain or _agree(model, decoder, head, probe)):
        return lambda tokens, targets: _losses_by_head(decoder, head, tokens, targets)
    return lambda tokens, targets: _losses_by_cache(model, tokens, targets)


def unwrap(model: Any) -> Any:
    """The transformers model inside wrappers of peft, torch.compile and data parallelism."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "get_base_model"):
            if model.active_peft_config.is_prompt_learning:
                raise ValueError(
                    "Perplexity of a model with a learnt prompt is not supported; merge or drop the adapter."
                )
            model = model.get_base_model()
        else:
            return model


def _parts(model: Any) -> tuple[Any, Any]:
    """(decoder, head), or (None, None) if the model does not separate them."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if decoder is None or decoder is model or head is None:
        return None, None
    return decoder, head


def _agree(model: Any, decoder: Any, head: Any, probe: Tensor) -> bool:
    """Whether the logits are exactly head(decoder(tokens)), compared bit for bit."""
    probe = probe.to(_device(model))
    expected = model(input_ids=probe, use_cache=False).logits
    return torch.equal(head(_hidden(decoder, probe)), expected)


def _hidden(decoder: Any, tokens: Tensor) -> Tensor:
    output = decoder(input_ids=tokens, use_cache=False)
    return output[0] if isinstance(output, tuple) else output.last_hidden_state


def _losses_by_head(decoder: Any, head: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return head_losses(head, _hidden(decoder, tokens).flatten(0, 1), targets.flatten()).view(targets.shape)


def head_losses(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Losses in nats of tokens [n] after states [n, C], with the logits of CHUNK_TOKENS of them at a time: [n]."""
    chunks = zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
    return torch.cat([_cross_entropy(head(part), wanted) for part, wanted in chunks])


def _losses_by_cache(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """The whole model, chunk by chunk through its cache; in one call if it makes none."""
    step = max(1, CHUNK_TOKENS // tokens.shape[0])
    losses, past, start = [], None, 0
    while start < tokens.shape[1]:
        output = model(input_ids=tokens[:, start : start + step], past_key_values=past, use_cache=True)
        past = getattr(output, "past_key_values", None)
        if past is None and tokens.shape[1] > step:
            output, start = model(input_ids=tokens, use_cache=False), 0
        wanted = targets[:, start : start + output.logits.shape[1]]
        losses.append(_cross_entropy(output.logits.flatten(0, 1), wanted.flatten()))
        losses[-1] = losses[-1].view(wanted.shape)
        start += wanted.shape[1]
    return torch.cat(losses, dim=1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss per token in nats, in float32 or wider: [n, V], [n] -> [n]."""
    return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device
