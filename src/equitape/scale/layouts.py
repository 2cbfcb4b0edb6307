"""How a model trains and serves on a number of GPUs: memory, operations, bytes over the wire and time of a layout."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .costs import ModelCosts
from .machines import PASSES, Gpu
from .settings import MOST_GPUS

Precision = Literal["mixed", "bfloat16"]
HALF, FULL = 2, 4
"""Bytes per number."""
GATHERED_BLOCKS = 2
"""Blocks whose whole weights a sharded process holds: the running one and the next."""
NEARLY = 0.9
"""A shorter ring is worth this share of the tokens per second: it waits for fewer links."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one GPU while training."""

    weights: float
    """With the rounded copy that mixed precision computes with."""
    optimizer: float
    """Adam's two averages."""
    gradients: float
    activations: float
    logits: float
    gathered: float
    """Whole weights of sharded blocks, and keys and values of whole rows in the running block."""
    peak: float
    """The most at one time: where the backward pass begins, or where it ends."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How GPUs share the work."""

    gpus: int
    context_parallel: int
    """GPUs among which each row is split."""
    sharded: bool
    """Whether weights and optimizer are split over all GPUs (FSDP2)."""
    checkpointing: bool

    @property
    def rows_at_once(self) -> int:
        """Groups of GPUs that each read other rows."""
        return self.gpus // self.context_parallel


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A training step in one layout."""

    layout: Layout
    memory: Memory
    fits: bool
    operations: float
    """Of one GPU, recomputation included."""
    compute_seconds: float
    ring_bytes: float
    """Keys and values that a GPU sends."""
    gather_bytes: float
    """Weights that a GPU receives, and gradients that it sends."""
    wire_seconds: float
    tokens: int
    """Of the step, over all GPUs."""

    @property
    def seconds(self) -> float:
        """Of a step, if the wire works while the GPU computes."""
        return max(self.compute_seconds, self.wire_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """Reading a prompt of the whole length, and one more token, in bfloat16."""

    weights: float
    cache: float
    """Bytes of one sequence."""
    gpus: int
    """The fewest whose memory holds both."""
    prefill_operations: float
    prefill_seconds: float
    """On those GPUs, without the time of their links."""
    token_bytes: float
    """Cache and weights that every new token reads: of a mixture, those of the experts that it passes."""
    token_seconds: float


def training_memory(
    costs: ModelCosts,
    tokens: int,
    *,
    precision: Precision = "mixed",
    checkpointing: bool = False,
    compiled: bool = True,
    cuda: bool = True,
    size: int = HALF,
    trained: int | None = None,
    shards: int = 1,
    parts: int = 1,
) -> Memory:
    """The memory of one process that reads `tokens` tokens at a time.

    precision: mixed trains float32 weights, bfloat16 has all weights and averages in the dtype of the computation.
    size: bytes per number of the computation. trained: weights that train. Default: all; frozen ones have the dtype of
    the computation. shards: processes that share weights, gradients and optimizer. parts: processes that share rows.
    """
    kept = FULL if precision == "mixed" else size
    everything = trained is None
    trained = costs.parameters if trained is None else trained
    sharded = shards > 1
    weights = trained * kept + (costs.parameters - trained) * size
    if kept > size and not sharded:
        weights += trained * size
    gathered = 0.0
    if sharded:
        largest = max(layer.parameters for layer in costs.layers)
        tables = costs.embedding_parameters * (1 if costs.config.tie_word_embeddings else 2)
        gathered = (GATHERED_BLOCKS * largest + tables) * size
    if parts > 1:
        gathered += tokens * parts * costs.gathered_row(size)
    optimizer, gradients = 2 * trained * kept, trained * kept
    options = {"compiled": compiled, "cuda": cuda}
    activations = tokens * (costs.kept_checkpoints(size) if checkpointing else costs.kept(size, **options))
    logits = tokens * costs.logits(size, compiled=compiled)
    one_block = tokens * max(costs.kept_by_block(block, size, **options) for block in costs.blocks)
    always = (weights + optimizer) / shards + gathered
    head = costs.embedding_parameters * kept if everything else 0
    begins = activations + logits + head
    ends = gradients / shards + one_block
    if checkpointing:
        # the last block is recomputed while everything else is still kept
        begins = max(begins, activations + one_block + head)
    return Memory(
        weights=weights / shards,
        optimizer=optimizer / shards,
        gradients=gradients / shards,
        activations=activations,
        logits=logits,
        gathered=gathered,
        peak=always + max(begins, ends),
    )


def plan_training(
    costs: ModelCosts, gpu: Gpu, layout: Layout, rows: int, length: int, precision: Precision = "mixed"
) -> TrainingPlan:
    """A step in which every group of GPUs reads `rows` rows of `length` tokens."""
    parts, gpus = layout.context_parallel, layout.gpus
    tokens = rows * length // parts
    memory = training_memory(
        costs,
        tokens,
        precision=precision,
        checkpointing=layout.checkpointing,
        shards=gpus if layout.sharded else 1,
        parts=parts,
    )
    forwards = 2 if layout.checkpointing else 1
    # the backward pass of a matrix product has two
    matrix = costs.forward(rows, length).matrix * (forwards + 2) / parts
    ahead, back = costs.attention(rows, length, ring=parts > 1)
    attention = (ahead * forwards + back) / parts
    kept = FULL if precision == "mixed" else HALF
    own = costs.parameters / (gpus if layout.sharded else 1)
    # the optimizer reads weight, gradient and averages, and writes all but the gradient
    moved = PASSES * (1 + (forwards - 1) / 3) * tokens * (costs.kept(HALF) + costs.logits(HALF)) + 7 * own * kept
    compute = gpu.matrix_seconds(matrix) + gpu.attention_seconds(attention, costs.head_dim) + gpu.moving_seconds(moved)
    ring = rows * (forwards * costs.ring(length, parts, HALF) + costs.ring_backward(length, parts, HALF))
    gather = 0.0
    if gpus > 1:
        # sharded weights are gathered by both passes; gradients are summed in the weights' dtype
        passes = 2 * HALF if layout.sharded else kept
        gather = costs.parameters * (passes + kept) * (gpus - 1) / gpus
    return TrainingPlan(
        layout=layout,
        memory=memory,
        fits=memory.peak <= gpu.usable,
        operations=matrix + attention,
        compute_seconds=compute,
        ring_bytes=ring,
        gather_bytes=gather,
        wire_seconds=gpu.ring_seconds(ring, parts) + gpu.gather_seconds(gather, gpus),
        tokens=rows * length * layout.rows_at_once,
    )


def layouts(gpus: int, length: int) -> Iterator[Layout]:
    """All layouts of so many GPUs; a row is split into two pieces per GPU, so that causal work is even."""
    for parts in range(1, gpus + 1):
        if gpus % parts == 0 and (parts == 1 or length % (2 * parts) == 0):
            for sharded in (False, True) if gpus > 1 else (False,):
                for checkpointing in (False, True):
                    yield Layout(gpus=gpus, context_parallel=parts, sharded=sharded, checkpointing=checkpointing)


def best_training(
    costs: ModelCosts,
    gpu: Gpu,
    gpus: int,
    rows: int,
    length: int,
    precision: Precision = "mixed",
    *,
    parts: int | None = None,
    checkpointing: bool | None = None,
) -> TrainingPlan:
    """Of the layouts that fit and have nearly the most tokens per second, the simplest: the fewest GPUs per row, then
    whole weights on every GPU. If none fits, the one with the least memory.

    parts, checkpointing: what the layout must have. Default: anything.
    """
    plans = [
        plan_training(costs, gpu, layout, rows, length, precision)
        for layout in layouts(gpus, length)
        if parts in (None, layout.context_parallel) and checkpointing in (None, layout.checkpointing)
    ]
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        fast = NEARLY * max(plan.tokens_per_second for plan in fitting)
        nearly = [plan for plan in fitting if plan.tokens_per_second >= fast]
        return min(
            nearly, key=lambda plan: (plan.layout.context_parallel, plan.layout.sharded, -plan.tokens_per_second)
        )
    return min(plans, key=lambda plan: plan.memory.peak)


def fewest_gpus(costs: ModelCosts, gpu: Gpu, rows: int, length: int, precision: Precision = "mixed") -> int | None:
    """The smallest power of two of GPUs on which a layout fits; None if none does."""
    gpus = 1
    while gpus <= MOST_GPUS:
        if any(plan_training(costs, gpu, each, rows, length, precision).fits for each in layouts(gpus, length)):
            return gpus
        gpus *= 2
    return None


def plan_serving(costs: ModelCosts, gpu: Gpu, length: int) -> ServingPlan:
    """One sequence of `length` tokens, split by heads over the fewest GPUs that hold it."""
    weights, cache = costs.parameters * HALF, costs.cache_of_row(length, HALF)
    gpus = 1
    while gpus * gpu.usable < weights + cache:
        gpus *= 2
    forward, read = costs.forward(1, length, logits=1), costs.read_by_token * HALF + cache
    seconds = gpu.matrix_seconds(forward.matrix) + gpu.attention_seconds(forward.attention, costs.head_dim)
    return ServingPlan(
        weights=weights,
        cache=cache,
        gpus=gpus,
        prefill_operations=forward.total,
        prefill_seconds=seconds / gpus,
        token_bytes=read,
        token_seconds=gpu.moving_seconds(read) / gpus,
    )
