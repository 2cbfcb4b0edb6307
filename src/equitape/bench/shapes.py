"""Named model sizes, and the settings of a benchmark run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from ..settings import Ge, Gt, Le, Settings
from .subjects import PAPER, parse_subject

if TYPE_CHECKING:
    import torch

    from ..model import EquitapeConfig

DEFAULT_ENCODINGS = ("rope", "nope", "alibi", "t5", "fire", "cope", "tape", PAPER)
Workload = Literal["attention", "core", "train", "prefill", "decode"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
MIN_RUNS = 20
MOST = (1 << 31) - 1
"""Largest size: torch and Triton count rows, tokens and channels in 32 bits at places."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder, with the name used in rows."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False

    def config(
        self, encoding: str | dict[str, Any], attention: str, max_positions: int, **changes: Any
    ) -> "EquitapeConfig":
        """The configuration of a model of these sizes, with an encoding and an attention implementation."""
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        from ..model import EquitapeConfig

        return EquitapeConfig(**{**sizes, **changes}, encoding=encoding, attn_implementation=attention)

    def resized(self, layers: int | None, width: int | None) -> "Shape":
        """The shape with another depth or width; head size and feed-forward proportion stay."""
        shape = self
        if layers is not None:
            shape = replace(shape, name=f"{shape.name}, {layers} layers", num_layers=layers)
        if width is not None:
            step = self.head_dim * (self.num_heads // self.num_kv_heads)
            if width < step or width % step:
                raise ValueError(
                    f"Width {width} does not fit shape {self.name!r}: it must be a multiple of {step}, the width of "
                    f"the query heads that share a key-value head."
                )
            shape = replace(
                shape,
                name=f"{shape.name}, width {width}",
                hidden_size=width,
                intermediate_size=self.intermediate_size * width // self.hidden_size,
                num_heads=width // self.head_dim,
                num_kv_heads=width // step,
            )
        return shape


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="tiny", hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
            vocab_size=128,
        ),
        Shape(
            name="155m", hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12, num_kv_heads=12,
            head_dim=64, vocab_size=32000,
        ),
        Shape(
            name="smollm2-135m", hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
            head_dim=64, vocab_size=49152, tied=True,
        ),
        Shape(
            name="1.1b", hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=16, num_kv_heads=16,
            head_dim=128, vocab_size=32000,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """What to measure. By default, sizes depend on the device: the 155m shape on CUDA, a tiny one on the CPU."""

    shape: Literal["tiny", "155m", "smollm2-135m", "1.1b"] | None = None
    """Model size. Default: 155m on CUDA, tiny on the CPU."""
    layers: Annotated[int, Ge(1), Le(MOST)] | None = None
    """Number of layers. Default: the shape's."""
    width: Annotated[int, Ge(1), Le(MOST)] | None = None
    """Hidden size. Default: the shape's."""
    workloads: tuple[Workload, ...] = WORKLOADS
    """What to time: an attention layer, its core without projections, a training step, a prefill, a decoding step.
    Default: all."""
    encodings: tuple[str, ...] | None = None
    """Encoding, with options after it: 'tape layers=[0]'. Or one of: tape-paper, TAPE in the paper's layout, for
    attention and core; tape-nn and rope-nn, layers of equitape.nn, for attention; llama, transformers' model, for
    train, prefill and decode; fla-rope, fla-fox, fla-path, layers of flash-linear-attention, for attention. Among the
    options, compile=false measures it uncompiled. Default: eight encodings."""
    lengths: tuple[Annotated[int, Ge(2), Le(MOST)], ...] | None = None
    """Tokens per sequence. Default: 1024 on CUDA, 128 on the CPU."""
    cache_lengths: tuple[Annotated[int, Ge(2), Le(MOST)], ...] | None = None
    """Tokens that a decoding step attends to. Default: --length."""
    batches: tuple[Annotated[int, Ge(1), Le(MOST)], ...] | None = None
    """Sequences per batch. Default: 16 on CUDA, 2 on the CPU."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtype of weights and activations. Default: bfloat16 on CUDA, float32 on the CPU."""
    compile: bool | None = None
    """Use torch.compile, and CUDA graphs for decoding. Default: on CUDA only."""
    graphs: bool = False
    """Also run training steps and prefills as CUDA graphs, as torch.compile's mode reduce-overhead does, to measure
    without host overhead. CUDA only."""
    runs: int | None = None
    """Timed runs per measurement. Default: 20; fewer only with --quick."""
    seconds: Annotated[float, Gt(0)] | None = None
    """Stop timing a measurement after about this many seconds, and after three runs at the earliest. Default: no
    limit."""
    quick: bool = False
    """Time only a few runs, as a smoke test."""
    once: bool = False
    """Skip RoPE's second measurement at the end, which shows drift of the machine."""
    csv: Path | None = None
    """Append one line per measurement to this CSV file."""
    plot: Path | None = None
    """Write a plot of time and memory against length to this file."""
    table: Path | None = None
    """Write a Markdown table of time and memory by length to this file."""
    show: Path | None = None
    """Show the measurements of this CSV file and measure nothing."""
    device: str | None = None
    """Device. Default: CUDA if available, else the CPU."""
    seed: int = 0
    """Seed of weights and inputs."""
    input_sets: int = 4
    """Number of input sets; runs cycle through them, so that no run finds its inputs in a cache."""

    def __post_init__(self) -> None:
        import torch

        from .rows import check_csv, check_place, check_plot

        if not self.workloads:
            raise ValueError(f"Nothing to measure; choose workloads from {', '.join(WORKLOADS)}.")
        if self.cache_lengths is not None and "decode" not in self.workloads:
            raise ValueError("--cache-length only applies to the workload decode; add it, or use --length.")
        for text in self.encodings or ():
            parse_subject(text).check(self.model_shape, self.workloads)
        if self.graphs and not (self.compiled and self.on_cuda):
            raise ValueError("--graphs needs compiled code on CUDA; drop --graphs, or the option that prevents it.")
        if self.num_runs < MIN_RUNS and not self.quick:
            raise ValueError(f"{self.num_runs} runs are too few for a median; use {MIN_RUNS} or more, or add --quick.")
        if self.num_runs < 1 or self.input_sets < 3:
            raise ValueError("A measurement needs at least one run and three sets of inputs.")
        if self.on_cuda and not torch.cuda.is_available():
            raise ValueError("This machine has no CUDA device; drop --device to measure on the CPU.")
        self.model_shape  # noqa: B018  raises for an invalid width
        if self.csv is not None:
            check_csv(self.csv)
        if self.plot is not None:
            check_plot(self.plot)
        if self.table is not None:
            check_place(self.table)

    @property
    def torch_device(self) -> "torch.device":
        import torch

        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def on_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def model_shape(self) -> Shape:
        return SHAPES[self.shape or ("155m" if self.on_cuda else "tiny")].resized(self.layers, self.width)

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        return getattr(torch, self.dtype or ("bfloat16" if self.on_cuda else "float32"))

    @property
    def compiled(self) -> bool:
        return self.on_cuda if self.compile is None else self.compile

    @property
    def num_runs(self) -> int:
        return self.runs if self.runs is not None else (3 if self.quick else MIN_RUNS)

    @property
    def warm_up(self) -> int:
        """Untimed runs, at least one per set of inputs."""
        return self.input_sets if self.quick or not self.on_cuda else max(10, self.input_sets)

    @property
    def all_lengths(self) -> tuple[int, ...]:
        return self.lengths or ((1024,) if self.on_cuda else (128,))

    @property
    def all_cache_lengths(self) -> tuple[int, ...]:
        return self.cache_lengths or self.all_lengths

    @property
    def all_batches(self) -> tuple[int, ...]:
        return self.batches or ((16,) if self.on_cuda else (2,))

    def encodings_for(self, workload: str) -> tuple[str, ...]:
        """Encodings to measure for a workload: RoPE first if requested, and again last, to show drift."""
        subjects = [parse_subject(text) for text in self.encodings or DEFAULT_ENCODINGS]
        chosen = list(dict.fromkeys(subject.name for subject in subjects if workload in subject.workloads))
        if "rope" in chosen:
            chosen.remove("rope")
            chosen = ["rope", *chosen, *(["rope"] if chosen and not self.once else [])]
        return tuple(chosen)
