"""Estimates of memory and time on one device, from the formulas of scale/; called estimates wherever they are shown."""

from dataclasses import dataclass
from functools import partial

from ..encodings.tape import updating_blocks
from ..model import EquitapeConfig
from ..pretrained.settings import AdaptSettings
from ..scale.costs import ModelCosts
from ..scale.layouts import training_memory

RATES = {"cuda": 1e14, "cpu": 6e10}
"""Operations per second that estimates of time assume, of a CPU per core; other devices count as 1e13."""
MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.5}
"""Of the device's memory that training may take by the estimate."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where the extension runs."""

    kind: str
    """cuda, cpu or another type of torch."""
    memory: int
    """Bytes in all."""
    cores: int = 2
    """Cores of a CPU."""

    @property
    def rate(self) -> float:
        """Assumed operations per second."""
        return RATES.get(self.kind, 1e13) * (self.cores if self.kind == "cpu" else 1)


def usable_bytes(device: Device, given: float | None = None) -> float:
    """Memory that training may take. given: in GiB, instead of a share of the device's."""
    if given is not None:
        return given * 2**30
    return MEMORY_SHARE.get(device.kind, 0.5) * device.memory


def training_seconds(costs: ModelCosts, device: Device, rows: int, row_length: int) -> float:
    """An estimate of the time of training on so many rows; the backward pass takes twice the forward's time."""
    return 3 * rows * costs.forward(1, row_length).total / device.rate


def fit_memory(
    costs: ModelCosts, device: Device, trained: int, row_length: int, batch_size: int, room: float
) -> tuple[int, bool, float]:
    """(micro-batches, whether to recompute activations, estimated bytes): the fastest way that fits, else the least.

    room: bytes that training may take.
    """
    ways = [
        (count, checkpointing)
        for checkpointing in (False, True)
        for count in range(1, batch_size + 1)
        if batch_size % count == 0
    ]
    cuda = device.kind == "cuda"
    # an upper estimate for LoRA: frozen layers keep less than the formulas say
    estimate = partial(training_memory, costs, compiled=False, cuda=cuda, size=2 if cuda else 4, trained=trained)
    for count, checkpointing in ways:
        needed = estimate(row_length * batch_size // count, checkpointing=checkpointing).peak
        if needed <= room:
            return count, checkpointing, needed
    return batch_size, True, needed


def count_trained(config: EquitapeConfig, adapt: AdaptSettings, parameters: int) -> int:
    """About how many weights train."""
    assert config.num_key_value_heads is not None and config.head_dim is not None
    if adapt.effects.everything:
        return parameters
    count = 0
    if adapt.effects.lora:
        queries, keys = (config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads))
        outs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
        width = config.hidden_size
        sizes = [width + outs.get(target, config.intermediate_size) for target in adapt.lora_targets]
        count += config.num_hidden_layers // config.num_loops * adapt.lora_rank * sum(sizes)
    if adapt.effects.tape:
        # TAPE's update is small: about four widths for each key-value head
        updating = updating_blocks(adapt.tape.get("layers", "all"), config.geometry)
        count += 4 * len(updating) * config.num_key_value_heads * config.hidden_size
    if adapt.trains("embeddings"):
        count += config.vocab_size * config.hidden_size
    return count
