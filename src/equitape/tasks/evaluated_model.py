"""An evaluated model: with its tokenizer, and what is known of it before it runs."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..data.tokens import describe_tokenizer
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
from ..pretrained.weights import digest_of, not_finite
from .perplexity import unwrap

CPU_BATCH_TOKENS = 4096
"""Tokens per batch on a CPU. Results are written after every batch, so a batch should take seconds."""
MOST_BATCH_TOKENS = 2**19
"""Longer batches are not faster."""
USABLE_SHARE = 0.5
"""Fraction of the free memory to use; fragments, logits and workspace take the rest."""
UNIMPORTANT = ("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version", "use_cache")
"""Parts of a configuration that do not change answers, or that `describe` has."""

Writing = Literal["generate", "steps", "graph"]
"""transformers' generate; steps with static shapes (static_decoding.py); or such steps as a CUDA graph."""


@dataclass(kw_only=True)
class EvaluatedModel:
    """A causal language model in evaluation mode, on its device."""

    model: Any
    tokenizer: Any
    name: str
    writing: Writing | None = None
    """How to decode. Default: as a CUDA graph if the model allows it, otherwise with generate."""
    uses_cache: bool = field(init=False)
    """Whether the model supports a cache; without one, every step recomputes the whole prefix."""
    mixes_lengths: bool = field(init=False)
    """Whether caches of different lengths can be joined, so that prompts of different lengths share a batch."""
    cache_bytes: int = field(init=False)
    """Cache size per token."""
    table: int | None = field(init=False)
    """Rows of the learned position table of another model class, which does not check them; None: no table."""

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
        """Raise ValueError for inputs beyond a learned table: on a GPU, reading beyond it would end the process."""
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
        """The model's context: the length it was trained on, otherwise the maximum in its configuration."""
        config = self.model.config
        if isinstance(config, EquitapeConfig):
            return config.context
        length = getattr(config, "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def batch_tokens(self) -> int:
        """Tokens per batch that fit in memory, by a rough estimate."""
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
        """Facts that identify the model, for reports."""
        model = unwrap(self.model)
        damaged = not_finite(model)
        return {
            "name": self.name,
            "class": type(model).__name__,
            "encoding": getattr(model.config, "encoding", None),
            "context": self.context,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "weights": digest_of(dict(model.named_parameters())),
            **({"not finite": damaged} if damaged else {}),
        }

    def describe_inputs(self) -> dict[str, Any]:
        """What else decides its answers: configuration, without names and versions, and a digest of the tokenizer."""
        config = unwrap(self.model).config
        given = config.to_diff_dict() if isinstance(config, PreTrainedConfig) else {}
        return {
            "config": {name: value for name, value in given.items() if name not in UNIMPORTANT},
            "tokenizer": hashlib.sha256(describe_tokenizer(self.tokenizer).encode()).hexdigest(),
        }


def find_table(model: Any, context: int | None) -> int | None:
    """Rows of a learned position table, as in GPT-2 and OPT; our models check theirs themselves."""
    if isinstance(model.config, EquitapeConfig):
        return None
    words = set(model.get_input_embeddings().modules())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module not in words]
    # some tables start with rows that are not positions
    rows = [table.num_embeddings - getattr(table, "offset", 0) for table in tables]
    return context if context in rows else None


@torch.no_grad()
def probe_cache(model: Any) -> Any:
    """The cache of two tokens, or None if the model makes none."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    try:
        return getattr(model(input_ids=tokens, use_cache=True), "past_key_values", None)
    except TypeError:
        # forward has no such argument
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
