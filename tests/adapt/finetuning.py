"""A small fine-tuning run, for tests and the processes they start."""

import json

from equitape.adapt import AdaptSettings
from equitape.adapt.finetune import FinetuneSettings, finetune
from equitape.data.tokenizers import byte_tokenizer
from families import make_source
from words import write_text

CONTEXT = 64


def make_room(folder):
    """Write a base with a byte tokenizer, text to train on, and text to score."""
    make_source(
        "llama-tied", vocab_size=258, max_position_embeddings=32, eos_token_id=256, pad_token_id=257
    ).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    write_text(folder / "data")
    write_text(folder / "test", documents=2)
    return folder


def settings_of(room, **changes):
    train = {"steps": 6, "batch_size": 2, "learning_rate": 1e-2}
    own = {key: changes.pop(key) for key in list(changes) if key in FinetuneSettings.__dataclass_fields__}
    return FinetuneSettings.parse(
        {"data": [str(room / "data")], "train": {**train, **changes}, "cache": str(room / "cache"), **own}, "test"
    )


def run(room, out, method="tape", resume=False, adapt=None, **changes):
    settings = AdaptSettings(method=method, context=CONTEXT, **(adapt or {}))
    return finetune(room / "base", settings, settings_of(room, **changes), out, resume=resume)


def losses(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
