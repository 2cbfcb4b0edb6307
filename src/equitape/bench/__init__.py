"""Speed and memory of an encoding in an attention layer, a training step, a prefill and a decoding step."""

from .shapes import SHAPES, WORKLOADS, BenchSettings, Shape

__all__ = ["SHAPES", "WORKLOADS", "BenchSettings", "Shape"]
