"""Whole models: every weight, LoRA's parts merged, with a model card."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ..model import EquitapeForCausalLM
from .adapter import CARD, adaptation_of
from .card import whole_card
from .files import written_aside
from .lora import merged_state


@contextmanager
def written_whole(model: EquitapeForCausalLM, directory: Path | str) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """For save_pretrained: a folder to write into and the state to write; the rest is seen to when the block ends."""
    with written_aside(directory) as aside, without_groups(model):
        yield aside, merged_state(model)
        (aside / CARD).write_text(whole_card(model, adaptation_of(model)))


@contextmanager
def without_groups(model: EquitapeForCausalLM) -> Iterator[None]:
    """Shifted sparse attention is how the adapter trains; whoever trains the whole model must not inherit it unseen."""
    size, model.config.shifted_group_size = model.config.shifted_group_size, None
    try:
        yield
    finally:
        model.config.shifted_group_size = size
