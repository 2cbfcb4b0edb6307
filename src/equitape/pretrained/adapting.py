"""adapt and load_adapter: turn a pretrained model into an Equitape decoder that records what it trains."""

import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..model import EquitapeConfig, EquitapeForCausalLM
from ..runs.errors import first_line
from ..runs.files import files_in
from .adapter import DESCRIPTION, TENSORS, describe_difference, insert, read_description, read_tensors, save_adapter
from .card import CARD, model_card
from .families import translate_config
from .lora import merged_state
from .methods import change_config, set_training, trained_parameters
from .settings import Adaptation, AdaptSettings, adaptation_of
from .weights import Base, convert, fingerprint, load_source

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class AdaptedForCausalLM(EquitapeForCausalLM):
    """An Equitape decoder made by `adapt`. It can save its trained tensors as an adapter, or the full model."""

    adaptation: Adaptation
    saves_trained_only: bool = False
    """If set, save_pretrained writes only trained tensors, for checkpoints; the base has the rest."""

    def save_adapter(self, directory: str | Path) -> None:
        """Write only the trained tensors; `equitape.load_adapter` loads them onto the base."""
        save_adapter(self, directory)

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """transformers' save_pretrained. Without a state_dict, it merges LoRA and adds a model card."""
        given = kwargs.get("state_dict")
        if self.saves_trained_only:
            # keep the parameter names, with LoRA unmerged: Trainer reads the file into this model
            state = given if given is not None else self.state_dict()
            trained = set(self.adaptation.trained)
            tensors = {name: tensor.contiguous() for name, tensor in state.items() if name in trained}
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save_file(tensors, Path(save_directory) / "model.safetensors", metadata={"format": "pt"})
        elif given is not None:
            super().save_pretrained(save_directory, *args, **kwargs)
        else:
            with files_in(save_directory) as aside:
                super().save_pretrained(aside, *args, **{**kwargs, "state_dict": merged_state(self)})
                (aside / CARD).write_text(model_card(self, self.adaptation))


# transformers writes this class name to config.json, and the saved model is a plain decoder
AdaptedForCausalLM.__name__ = EquitapeForCausalLM.__name__


def adapt(
    base: Base, method: str = "tape+lora", *, dtype: str | torch.dtype = "auto", **options: Any
) -> AdaptedForCausalLM:
    """Convert a pretrained model to an Equitape decoder, prepared for training by a method.

    base: a folder with safetensors, a GGUF file, a name on the Hub, or a loaded transformers model, of a family in
        docs/how-to/adapt.md (Llama, Mistral, Mixtral, Qwen, SmolLM, Gemma, OLMo 2, Phi-3). The decoder shares the
        tensors of a loaded model: training them changes that model too.
    method: a name in `equitape.adapt.METHODS`: tape, lora, tape+lora, longlora, theta, theta+lora, drope, full, ...
    dtype: dtype of weights read from a path; "auto" keeps the file's (GGUF: float32).
    options: fields of `AdaptSettings`: context, scaling, theta, train_embeddings, lora_rank, ...

    Outputs equal the original's until something is trained, unless scaling, theta or query_growth change them. The
    model is in evaluation mode, and only what the method trains requires gradients.
    """
    return build(base, AdaptSettings.parse({"method": method, **options}, "adapt"), dtype)


def build(base: Base, settings: AdaptSettings, dtype: str | torch.dtype = "auto") -> AdaptedForCausalLM:
    """`adapt` with settings already parsed."""
    source = load_source(base, dtype, check=lambda config: change_config(config, settings))
    config = translate_config(source.config)
    model = convert(source, change_config(config, settings), settings.seed, AdaptedForCausalLM)
    set_training(model, settings)
    model.adaptation = Adaptation(
        settings=settings,
        base_name=name_of(base),
        base=fingerprint(source, config),
        trained=tuple(name for name, _ in trained_parameters(model)),
    )
    return model


def load_adapter(base: Base, directory: Path | str, *, dtype: str | torch.dtype = "auto") -> AdaptedForCausalLM:
    """Load an adapter: the base, as for `adapt`, with the tensors that `save_adapter` wrote.

    directory: a folder, or the name of a repository on the Hugging Face Hub.
    Tensors are bit-identical if the base has the dtype they were trained in; otherwise they are rounded to it.
    """
    folder = find_adapter(directory)
    description = read_description(folder)
    tensors = read_tensors(folder, description)
    settings = AdaptSettings.parse(description["settings"], f"{str(folder / DESCRIPTION)!r}")
    model = build(base, settings, dtype)
    adaptation = adaptation_of(model)
    difference = describe_difference(description["base"], adaptation.base)
    if difference is not None:
        raise ValueError(
            f"The adapter in {str(directory)!r} was trained on {description['base'].get('name')!r}; "
            f"{adaptation.base_name!r} is a different base: {difference}."
        )
    insert(model, tensors, adaptation.trained, str(directory))
    adaptation.training = description["training"]
    return model


def find_adapter(name: Path | str) -> Path:
    """The folder of an adapter, downloaded from the Hugging Face Hub if it does not exist locally."""
    folder = Path(name).expanduser()
    if folder.exists() or not HUB_NAME.fullmatch(str(name)):
        return folder
    try:
        return Path(snapshot_download(str(name), allow_patterns=[DESCRIPTION, TENSORS]))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"There is no adapter in {str(name)!r}: there is no such folder, and no repository of that name can "
            f"be downloaded from the Hugging Face Hub ({first_line(error)})."
        ) from None


def save_whole(model: EquitapeForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Write the model, its card and its tokenizer, if any, to one folder."""
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, model.config, folder)


def save_tokenizer(tokenizer: Any, config: EquitapeConfig, folder: Path) -> None:
    """Write the tokenizer of a saved model, if it has one."""
    if tokenizer is not None:
        tokenizer.model_max_length = config.max_position_embeddings
        with files_in(folder) as aside:
            tokenizer.save_pretrained(aside)


def name_of(base: Base) -> str:
    """The name of a base: the last part of its path."""
    given = base.config._name_or_path if isinstance(base, PreTrainedModel) else base
    name = Path(str(given)).expanduser().resolve().name if str(given) else ""
    return name or (base.config.model_type if isinstance(base, PreTrainedModel) else str(base))
