"""Look inside a model: what positional states do, how stable they are, and whether promises are kept."""

from .capture import LayerRecord, frozen_state, visit_layers
from .certificate import Certificate, Check, certify
from .look import Inspection, look_inside
from .page import write_page
from .pictures import write_pictures
from .stability import Stability, measure_stability

__all__ = [
    "Certificate",
    "Check",
    "Inspection",
    "LayerRecord",
    "Stability",
    "certify",
    "frozen_state",
    "look_inside",
    "measure_stability",
    "visit_layers",
    "write_page",
    "write_pictures",
]
