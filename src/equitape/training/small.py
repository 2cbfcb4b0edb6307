"""Reduced recipes: the same task and encodings, small enough to run offline on a CPU in about a minute."""

from typing import Any

TASKS: dict[str, dict[str, Any]] = {
    "addition": {"trained_digits": 3, "tested_digits": 4, "stride": 1, "samples": 8},
    "multiplication": {"trained_digits": 4, "tested_digits": 8, "samples": 8},
    "copy": {"trained_symbols": 6, "tested_symbols": 12, "samples": 8},
    "reverse": {"trained_symbols": 6, "tested_symbols": 12, "samples": 8},
    "selective_copy": {"symbols": 8, "blanks": 8, "dense_blanks": 4, "sparse_blanks": 16, "samples": 8},
    "flip_flop": {"length": 64, "samples": 16},
    "retrieval": {"length": 32, "needles": 4, "queries": 2, "samples": 64, "depths": 4},
    "parity": {"trained_steps": 8, "tested_steps": 16, "samples": 32},
    "s5": {"trained_steps": 8, "tested_steps": 16, "samples": 32},
    "a5": {"trained_steps": 8, "tested_steps": 16, "samples": 32},
    "text": {
        "train": "shipped:train",
        "valid": "shipped:valid",
        "tokenizer": "bytes",
        "length": 128,
        "factors": [1, 2, 4],
        "eval_tokens": 4096,
        "stream": False,
    },
    "scrolls": {
        "train": "shipped:scrolls",
        "valid": "shipped:scrolls",
        "tokenizer": "bytes",
        "length": 512,
        "samples": 4,
    },
}
"""Replacements of task options; other options stay as in the recipe."""
MODEL = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 6, "num_hidden_layers": 6}
TRAIN = {"steps": 10, "batch_size": 8, "learning_rate": 1e-3, "compile": False, "logging_steps": 5}
NOTE = "Reduced by --small to a tiny model and a few steps; scores are meaningless."
DROPPED = ("tokens", "minutes", "gradient_accumulation_steps", "eval_steps", "save_steps")
"""Training settings that do not apply at the reduced size."""


def reduce(content: dict[str, Any]) -> dict[str, Any]:
    """The data of a recipe, reduced: one seed, a small model, few steps, built-in text.

    It shows that a recipe works and what its report looks like; the scores are meaningless. Published figures are
    dropped, since they are not comparable.
    """
    task = dict(content.get("task") or {})
    train = {key: value for key, value in (content.get("train") or {}).items() if key not in DROPPED}
    given = content.get("encodings") or ()
    encodings = [_reduce_encoding(each) for each in (given if isinstance(given, list | tuple) else [given])]
    if any(isinstance(given, dict) and "start" in given for given in encodings):
        # train from scratch, not from a checkpoint
        encodings = ["rope", "tape"]
    reduced = {key: value for key, value in content.items() if key not in ("claims", "claims_source")}
    return reduced | {
        "description": f"{NOTE} The full recipe: {content.get('description', '')}".strip(),
        "task": task | TASKS.get(str(task.get("name")), {}),
        "model": (content.get("model") or {}) | MODEL,
        "encodings": encodings,
        "seeds": [0],
        "train": train | TRAIN,
    }


def _reduce_encoding(given: Any) -> Any:
    return {key: value for key, value in given.items() if key != "seeds"} if isinstance(given, dict) else given
