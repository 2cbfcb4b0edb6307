"""Load a model and its tokenizer to evaluate it."""

from pathlib import Path

from ..pretrained.loading import check_hub, check_model, choose_device, is_local, load_model, load_tokenizer_of
from ..tasks.evaluated_model import EvaluatedModel


def model_label(name: str, label: str | None = None) -> str:
    """The name of a model in reports: the label, or the name of its folder."""
    return label or Path(name).expanduser().resolve().name


def load_evaluated_model(
    name: str,
    *,
    base: str | None = None,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    label: str | None = None,
) -> EvaluatedModel:
    """Load a model by its folder or file. Pretrained models keep the class that transformers gives them.

    base: the model under an adapter. tokenizer: its folder, or "bytes". label: the model's name in reports.
    """
    place = choose_device(device)
    check_model(name, base)
    if not is_local(name):
        # otherwise a mistyped folder would be reported as a missing tokenizer
        check_hub(name)
    # the tokenizer first: if it is missing, the error comes before minutes of loading
    loaded_tokenizer = load_tokenizer_of(name, base, tokenizer)
    model = load_model(name, dtype, base, as_ours=False)
    return EvaluatedModel(model=model.to(place), tokenizer=loaded_tokenizer, name=model_label(name, label))
