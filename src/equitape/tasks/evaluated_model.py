"""What is evaluated: a model with its tokenizer, and what can be told about it before it runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from ..model import EquitapeConfig
from ..pretrained.loading import (
    check_hub,
    check_model,
    check_vocabulary,
    choose_device,
    is_local,
    load_model,
    load_tokenizer_of,
)
from ..pretrained.weights import digest_of
from .perplexity import unwrap

CPU_BATCH_TOKENS = 4096
"""Tokens per batch on a CPU. Results are written after every batch, so a batch should take seconds."""
MOST_BATCH_TOKENS = 2**19
"""Longer batches are not faster."""
USABLE_SHARE = 0.5
"""Of the free memory; fragments, logits and work space take the rest."""

Writing = Literal["generate", "steps", "graph"]
"""By transformers' generate; by steps of fixed shapes (steps.py); or by such a step replayed as a CUDA graph."""


@dataclass(kw_only=True)
class EvaluatedModel:
    """A causal language model in evaluation mode, on its device."""

    model: Any
    tokenizer: Any
    name: str
    writing: Writing | None = None
    """How answers are written; None: as a graph on CUDA where the model allows it, else by generate."""
    uses_cache: bool = field(init=False)
    """Whether the model can continue from a cache; without one, generation computes everything again each step."""
    mixes_lengths: bool = field(init=False)
    """Whether caches of prompts of different lengths can be joined, so that these are answered together."""
    cache_bytes: int = field(init=False)
    """Of one token in the cache."""
    table: int | None = field(init=False)
    """Positions of a learned table in a model of transformers' own, which does not check them; None: it has none."""

    def __post_init__(self) -> None:
        check_vocabulary(self.tokenizer, self.vocab_size)
        cache = probe_cache(self.model)
        self.uses_cache = cache is not None
        plain = [type(layer) is DynamicLayer for layer in getattr(cache, "layers", [])]
        self.mixes_lengths = bool(plain) and all(plain)
        held = [(layer.keys, layer.values) for layer in cache.layers] if self.mixes_lengths else []
        self.cache_bytes = sum(part.nbytes // part.shape[2] for pair in held for part in pair)
        self.table = find_table(unwrap(self.model), self.context)

    def check_table(self, tokens: int) -> None:
        """Refuse what is beyond a learned table: on a GPU, reading it there would end everything, not this alone."""
        if self.table is not None and tokens > self.table:
            raise ValueError(f"Input and answer of {tokens} tokens are beyond the model's {self.table} positions.")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        return unwrap(self.model).get_input_embeddings().weight.shape[0]

    @property
    def context(self) -> int | None:
        """Tokens the model is meant for, where it says so: trained on, or else the most it announces."""
        config = self.model.config
        if isinstance(config, EquitapeConfig):
            return config.context
        length = getattr(config, "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def batch_tokens(self) -> int:
        """Tokens that fit into memory together, by a rough estimate."""
        if self.device.type != "cuda":
            return CPU_BATCH_TOKENS
        config = self.model.config
        width = getattr(config, "hidden_size", 1024)
        inner = getattr(config, "intermediate_size", None) or 4 * width
        size = next(self.model.parameters()).element_size()
        # a growing cache is copied layer by layer
        needed = 1.5 * self.cache_bytes + (8 * width + 4 * inner) * size
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(min(USABLE_SHARE * free / needed, MOST_BATCH_TOKENS))

    def describe(self) -> dict[str, Any]:
        """What tells one model from another, and what reports say of it."""
        model = unwrap(self.model)
        return {
            "name": self.name,
            "class": type(model).__name__,
            "encoding": getattr(model.config, "encoding", None),
            "context": self.context,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "weights": digest_of(dict(model.named_parameters())),
        }


def find_table(model: Any, context: int | None) -> int | None:
    """Positions in a learned table, as GPT-2 and OPT have it; models of ours look after theirs themselves."""
    if isinstance(model.config, EquitapeConfig):
        return None
    words = set(model.get_input_embeddings().modules())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module not in words]
    # some begin behind a few rows that stand for no position
    rows = [table.num_embeddings - getattr(table, "offset", 0) for table in tables]
    return context if context in rows else None


@torch.no_grad()
def probe_cache(model: Any) -> Any:
    """The cache a model makes of two tokens, or None where it makes none."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    try:
        return getattr(model(input_ids=tokens, use_cache=True), "past_key_values", None)
    except TypeError:
        # a forward without such an argument
        return None


def model_label(name: str, label: str | None = None) -> str:
    """The name of a model in reports: the label, or its folder's name."""
    return label or Path(name).expanduser().resolve().name


def load_evaluated_model(
    name: str,
    *,
    base: str | None = None,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    label: str | None = None,
) -> EvaluatedModel:
    """Load a model from its folder or file. Pretrained models keep the class that transformers gives them.

    base: the model under an adapter. tokenizer: its folder, or "bytes". label: the model's name in reports.
    """
    place = choose_device(device)
    check_model(name, base)
    if not is_local(name):
        # otherwise a mistyped folder would look like a missing tokenizer
        check_hub(name)
    # load the tokenizer first, so that a missing one fails before minutes of loading
    loaded_tokenizer = load_tokenizer_of(name, base, tokenizer)
    model = load_model(name, dtype, base, as_ours=False)
    return EvaluatedModel(model=model.to(place), tokenizer=loaded_tokenizer, name=model_label(name, label))
