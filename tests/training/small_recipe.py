"""The plain data of a recipe that trains in a moment."""

SMALL = {
    "task": {"name": "addition", "trained_digits": 1, "tested_digits": 2, "samples": 2},
    "model": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "encodings": ["rope", "tape"],
    "train": {"steps": 4, "batch_size": 4},
}
