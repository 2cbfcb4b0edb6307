"""A small fine-tuning run, for tests and the processes they start."""

import json

from equitape.adapt import AdaptSettings
from equitape.adapt.finetune import FinetuneSettings, finetune

CONTEXT = 64


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
