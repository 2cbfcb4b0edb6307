"""What a benchmark measures: an encoding with options, or a model or layer of another library."""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..registry import describe_choices
from ..values import parse_encoding_words

if TYPE_CHECKING:
    from .shapes import Shape

PAPER = "tape-paper"
"""TAPE computed in the paper's layout, for parts of a layer only."""
LLAMA = "llama"
"""transformers' own Llama, with the weights of our RoPE model."""
FLA = {"fla-rope": "Attention", "fla-fox": "ForgettingAttention", "fla-path": "PaTHAttention"}
"""Attention layers of flash-linear-attention by name."""
STANDALONE = {"rope-nn": "rope", "tape-nn": "tape"}
"""Attention layers of equitape.nn by name, and the encodings they have."""
PARTS = ("attention", "core")
"""Workloads that are a part of one layer."""
MODELS = ("train", "prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A text such as "tape layers=[0] compile=false", parsed."""

    name: str
    kind: str
    options: dict[str, Any]
    compile: bool | None = None
    """Whether to compile it. Default: as the others."""

    @property
    def workloads(self) -> tuple[str, ...]:
        """The workloads it can be measured by."""
        if self.kind in FLA or self.kind in STANDALONE:
            return ("attention",)
        return {PAPER: PARTS, LLAMA: MODELS}.get(self.kind, (*PARTS, *MODELS))

    @property
    def is_encoding(self) -> bool:
        """Whether it is an encoding of this package in its own layout."""
        return self.kind not in (PAPER, LLAMA, *FLA, *STANDALONE)

    @property
    def encoding(self) -> dict[str, Any]:
        """The encoding of the model whose outputs it must have."""
        kind = {PAPER: "tape", LLAMA: "rope", **STANDALONE}.get(self.kind, self.kind)
        return {"kind": kind, **self.options}

    def check(self, shape: "Shape", workloads: tuple[str, ...]) -> None:
        """Raise ValueError if it cannot be measured here."""
        from ..encodings import ENCODINGS

        known = {*ENCODINGS, PAPER, LLAMA, *FLA, *STANDALONE}
        if self.kind not in known:
            raise ValueError(f"Unknown encoding {self.kind!r}.{describe_choices(self.kind, known)}")
        chosen = [workload for workload in workloads if workload in self.workloads]
        if not chosen:
            what = "a model" if self.workloads == MODELS else "a part of a layer, not a model"
            raise ValueError(f"{self.kind!r} is {what}; measure it with workload {' or '.join(self.workloads)}.")
        if self.kind in FLA:
            self._check_fla()
        if not self.is_encoding and self.options:
            raise ValueError(f"{self.kind!r} has no options; allowed: compile=true or compile=false.")
        if self.is_encoding or self.kind == PAPER:
            # a part of a layer is the first of two blocks
            for layers in {2 if workload in PARTS else shape.num_layers for workload in chosen}:
                shape.config(self.encoding, "sdpa", 2048, num_hidden_layers=layers)

    def _check_fla(self) -> None:
        packages = {"fla": "flash-linear-attention"}
        if self.kind == "fla-rope":
            packages["flash_attn"] = "flash-attn"
        for module, package in packages.items():
            if importlib.util.find_spec(module) is None:
                raise ValueError(f"{self.kind!r} needs the package {package}; run `pip install {package}`.")


def parse_subject(text: str) -> Subject:
    """Parse a kind followed by key=value words; compile is none of its options."""
    kind, options = parse_encoding_words(text)
    compiled = options.pop("compile", None)
    if compiled is not None and not isinstance(compiled, bool):
        raise ValueError(f"--encoding {text!r} has compile={compiled!r}; use true or false.")
    return Subject(name=" ".join(text.split()), kind=kind, options=options, compile=compiled)
