"""A small fine-tuning run and its text, for tests and the processes they start."""

import json

from equitape.adapt import AdaptSettings
from equitape.adapt.finetune import FinetuneSettings, finetune

CONTEXT = 64
WORDS = [
    "the",
    "sea",
    "was",
    "calm",
    "and",
    "the",
    "night",
    "was",
    "long",
    "while",
    "we",
    "sailed",
    "on",
    "towards",
    "the",
    "islands",
    "of",
    "the",
    "south",
]


def write_text(path, documents=4, words=150):
    path.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        text = " ".join(WORDS[(number + 3 * index + index // 7) % len(WORDS)] for index in range(words))
        (path / f"{number}.txt").write_text(text)


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
