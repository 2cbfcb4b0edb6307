"""The table of encodings that the contract tests run over, and builders of small models with random weights."""

import copy
from collections import OrderedDict

import torch

from equitape import EquitapeConfig, EquitapeForCausalLM

YARN = {"kind": "yarn", "factor": 4.0, "original_max_positions": 16}

# every registered kind appears under its own name; variants follow with a suffix
CASES = {
    "nope": {},
    "fox": {},
    "learned": {},
    "sinusoidal": {},
    "rope": {},
    "rope-yarn": {"scaling": YARN},
    "rope-dynamic": {"scaling": {"kind": "dynamic", "factor": 2.0, "original_max_positions": 8}},
    "rope-learned": {"decay": "learned", "decay_heads": 0.5, "decay_slowest": 2**-12},
    "rope-decaying": {"decay": "gate", "decay_heads": 0.5, "decay_inside": "decaying"},
    "rope-clock": {"clock": True, "clock_most": 3.0, "decay": "gate"},
    "rope-values": {"rotate_values": 1.0},
    "xpos": {},
    "randpe": {},
    "randpe-sampled": {"sample_in_eval": True},
    "alibi": {},
    "t5": {"num_buckets": 8, "max_distance": 20},
    "fire": {"initial_threshold": 6.0},
    "cope": {"num_positions": 5},
    "path": {},
    "path-gate": {"decay": "gate", "convolution": 2, "rank": 8},
    "path-learned": {"decay": "learned"},
    "tape": {},
    "tape-options": {
        "normalize": True,
        "complex_mixing": True,
        "source": "mlp",
        "mixer_size": 3,
        "layers": [0],
        "scaling": YARN,
    },
    "tape-fourier": {"init": "fourier"},
    "tape2": {},
    "tape2-decaying": {"decay_inside": "decaying", "layers": "first_and_middle"},
    "tape2-carried": {"carried_frequencies": 2},
    "tape2-values": {"rotate_values": 0.5},
    "tape2-full": {"move": True, "decay_heads": 1.0, "decay_inside": False},
    "tape-inside": {"move": True, "decay": "gate", "decay_inside": True, "clock": True, "normalize": True},
    "tape-clock": {"move": True, "attention_update": False, "clock": True, "clock_speed": 3.0, "decay": "gate"},
    "tensor_tape": {},
    "tensor_tape-l1r4": {"channels": 1, "components": 4, "init": "fourier"},
    "tensor_tape-l4r1": {"channels": 4, "components": 1, "init": "fourier"},
    "tensor_tape-components": {"mix_over": "heads+components"},
    "tensor_tape-channels": {"mix_over": "heads+channels"},
    "tensor_tape-maximal": {"mix_over": "maximal"},
}
CACHEABLE = [case for case in CASES if case not in ("rope-dynamic", "randpe-sampled")]
"""Cases that can continue a cache."""
DECODED = [case for case in CACHEABLE if not case.startswith("tensor_tape-")]
"""For tests of decoders: variants of tensor_tape cache what it caches, and differ in how layers update it."""
VOCAB = 41


def encoding_of(case: str, **options) -> dict:
    """The configuration entry of a case."""
    return {"kind": case.split("-")[0], **CASES.get(case, {}), **options}


def tiny_config(case: str, options: dict | None = None, **changes) -> EquitapeConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return EquitapeConfig(**{**sizes, **changes}, encoding=encoding_of(case, **(options or {})))


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter a random value: a model at its start is RoPE or NoPE, and proves nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            if parameter.dim() < 2:
                parameter.add_(0.2 * noise)
            else:
                # of a size at which neither signals nor rounding errors grow from layer to layer
                scale = (0.7 if "encoding" in name else 1.4) / parameter.shape[-1] ** 0.5
                parameter.copy_(scale * noise)


built = OrderedDict()
"""The last models of `build`: a copy takes half the time."""


def build(case: str, options: dict | None = None, dtype=torch.float64, seed: int = 0, **changes) -> EquitapeForCausalLM:
    """A small model in evaluation mode with random weights."""
    settings = (case, options, dtype, seed, changes)
    if repr(settings) in built:
        built.move_to_end(repr(settings))
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = EquitapeForCausalLM(tiny_config(case, options, **changes))
        randomise(model, seed)
        built[repr(settings)] = model.to(dtype).eval()
        if len(built) > 100:
            built.popitem(last=False)
    return copy.deepcopy(built[repr(settings)])


def draw_tokens(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, columns), generator=torch.Generator().manual_seed(seed))


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference; NaN counts as infinite."""
    difference = (a.double() - b.double()).abs().max().item()
    return float("inf") if difference != difference else difference
