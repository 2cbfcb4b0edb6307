"""From a model's name and settings to plans."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..bench.shapes import SHAPES, Shape
from ..model import EquitapeConfig
from ..pretrained.weights import read_config
from ..registry import describe_choices
from ..runs.folders import model_folder
from ..values import parse_encoding_words
from .costs import ModelCosts
from .layouts import ServingPlan, TrainingPlan, best_training, fewest_gpus, plan_serving
from .machines import GPUS
from .settings import PlanSettings

LARGE = {
    shape.name: shape
    for shape in (
        Shape(
            name="7b", hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
            head_dim=128, vocab_size=32000,
        ),
        Shape(
            name="70b", hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8,
            head_dim=128, vocab_size=128256,
        ),
        Shape(
            name="405b", hidden_size=16384, intermediate_size=53248, num_layers=126, num_heads=128, num_kv_heads=8,
            head_dim=128, vocab_size=128256,
        ),
    )
}  # fmt: skip
"""Sizes to plan for: those of Mistral 7B, Llama 3 70B and Llama 3.1 405B."""
NAMED = {**SHAPES, **LARGE}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Training and serving of a model with one encoding."""

    model: str
    encoding: str
    parameters: int
    length: int
    gpu: str
    training: TrainingPlan
    fewest_gpus: int | None
    """The smallest power of two of GPUs on which training fits."""
    serving: ServingPlan

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "training": self.training.to_dict()}


def make_plans(model: str | Path, settings: PlanSettings) -> list[Plan]:
    """One plan per encoding."""
    gpu = GPUS[settings.gpu]
    plans = []
    for name, config in configurations(model, settings):
        costs = ModelCosts(config)
        if costs.encoding.adds_bias:
            raise ValueError(
                f"Encoding {costs.encoding.kind!r} adds a bias to every score, which the formulas do not cover; "
                f"use an encoding without one, such as rope, alibi or tape."
            )
        plans.append(
            Plan(
                model=str(model),
                encoding=name,
                parameters=costs.parameters,
                length=settings.length,
                gpu=settings.gpu,
                training=best_training(
                    costs,
                    gpu,
                    settings.gpus,
                    settings.batch,
                    settings.length,
                    settings.precision,
                    parts=settings.context_parallel,
                    checkpointing=settings.checkpointing,
                ),
                fewest_gpus=fewest_gpus(costs, gpu, settings.batch, settings.length, settings.precision),
                serving=plan_serving(costs, gpu, settings.length),
            )
        )
    return plans


def configurations(model: str | Path, settings: PlanSettings) -> list[tuple[str, EquitapeConfig]]:
    """The configuration of a model with each encoding to plan for, under the encoding's name."""
    if str(model) in NAMED:
        shape = NAMED[str(model)]
        return [
            (name, shape.config(parse_encoding_option(name), "sdpa", settings.length))
            for name in settings.encodings or ("rope", "tape")
        ]
    if not Path(model).expanduser().exists() and "/" not in str(model):
        raise ValueError(
            f"There is no size or model {str(model)!r}.{describe_choices(str(model), NAMED)} A folder, a GGUF file or "
            f"a name on the Hub works too."
        )
    config = read_config(model_folder(str(model)))
    assert isinstance(config.encoding, dict)
    own = config.encoding["kind"]
    names = settings.encodings or ((own, "tape") if own == "rope" else (own,))
    # a learned table of positions must reach the length
    config.max_position_embeddings = max(config.max_position_embeddings, settings.length)
    return [(name, config if name == own else with_encoding(config, parse_encoding_option(name))) for name in names]


def parse_encoding_option(text: str) -> dict[str, Any]:
    """An encoding named with its options, as "tape layers=[0]"."""
    kind, options = parse_encoding_words(text)
    return {"kind": kind, **options}


def with_encoding(config: EquitapeConfig, encoding: dict[str, Any]) -> EquitapeConfig:
    """The configuration with another encoding."""
    return EquitapeConfig.from_dict({**config.to_dict(), "encoding": encoding})
