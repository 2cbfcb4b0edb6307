"""GPUs by name: what their makers promise, and which part of it our measurements reached."""

from dataclasses import dataclass

NODE = 8
"""GPUs of a machine, connected by NVLink."""
MATRIX_SHARE = 0.70
"""Of the promised operations per second that matrix products reach."""
ATTENTION_SHARE = {64: 0.42, 128: 0.48}
"""The same of fused causal attention, from this head dimension on."""
COPY_SHARE = 0.89
"""Of the promised memory bandwidth that a copy reaches."""
PASSES = 7
"""How often a training step moves each kept activation: written and read by both passes, with its gradient."""
MEMORY_SHARE = 0.9
"""Of the memory that a plan may fill; the rest is for workspaces and fragments."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU and its links; bytes and operations per second."""

    name: str
    memory: float
    """Bytes."""
    operations: float
    """bfloat16, dense."""
    bandwidth: float
    """Of its memory."""
    link: float
    """NVLink, one direction."""
    network: float = 50e9
    """Its link to other machines, one direction: 400 Gbit/s."""

    @property
    def usable(self) -> float:
        return MEMORY_SHARE * self.memory

    def matrix_seconds(self, operations: float) -> float:
        return operations / (MATRIX_SHARE * self.operations)

    def attention_seconds(self, operations: float, head_dim: int) -> float:
        return operations / (ATTENTION_SHARE[128 if head_dim >= 128 else 64] * self.operations)

    def moving_seconds(self, size: float) -> float:
        """To read or write so many bytes of its memory."""
        return size / (COPY_SHARE * self.bandwidth)

    def ring_seconds(self, size: float, processes: int) -> float:
        """To send so many bytes to the next of several processes; the slowest link decides."""
        return size / (self.link if processes <= NODE else self.network)

    def gather_seconds(self, size: float, processes: int) -> float:
        """To gather or reduce so many bytes over all processes. Bytes enter a machine once, over the links of all its
        GPUs.
        """
        return size / (self.link if processes <= NODE else min(self.link, NODE * self.network))


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="a100", memory=80e9, operations=312e12, bandwidth=2.04e12, link=300e9, network=25e9),
        Gpu(name="h100", memory=80e9, operations=989e12, bandwidth=3.35e12, link=450e9),
        Gpu(name="h200", memory=141e9, operations=989e12, bandwidth=4.8e12, link=450e9),
        Gpu(name="b200", memory=180e9, operations=2250e12, bandwidth=8e12, link=900e9),
    )
}
