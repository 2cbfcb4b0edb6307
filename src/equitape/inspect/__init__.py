"""Look inside a model: positional states, their stability, and whether the encoding keeps its guarantees."""

from .capture import LayerRecord, frozen_state, visit_layers
from .certificate import certify
from .inspection import Inspection, inspect_model
from .stability import Stability, measure_stability
from .verdicts import Certificate, Check

__all__ = [
    "Certificate",
    "Check",
    "Inspection",
    "LayerRecord",
    "Stability",
    "certify",
    "frozen_state",
    "inspect_model",
    "measure_stability",
    "visit_layers",
]
