"""Read pretrained weights: a folder, a GGUF file or a loaded model becomes a decoder that shares its tensors."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_error

from ..encodings.base import ENCODINGS
from ..model import EquitapeConfig, EquitapeForCausalLM
from ..model.checks import check_loading
from ..registry import describe_choices
from ..runs.errors import first_line, is_out_of_memory, named_line
from ..runs.files import read_json
from .adapter import DESCRIPTION
from .families import FAMILIES, split_fused, translate_config

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RUNS, VALUES_IN_A_RUN = 8, 512
"""Values that a fingerprint reads of each tensor, in contiguous runs, since weights may be on disk."""
FINGERPRINTED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "tie_word_embeddings", "attention_bias", "attention_output_bias", "mlp_bias", "qk_norm",
    "sliding_window", "sliding_layers", "num_loops", "qk_norm_joint", "norms", "norm_offset", "query_scale",
    "attention_softcap", "logit_softcap", "embedding_scale", "unrotated_layers", "experts", "local_encoding",
    "query_growth", "query_growth_start",
)  # fmt: skip

Base: TypeAlias = str | Path | PreTrainedModel
Decoder = TypeVar("Decoder", bound=EquitapeForCausalLM)
Check = Callable[[EquitapeConfig], object]


def load_source(base: Base, dtype: str | torch.dtype = "auto", check: Check | None = None) -> PreTrainedModel:
    """The model to adapt: the given model, or one read from a folder, a GGUF file or the Hub.

    dtype: dtype of weights read from a path; "auto" keeps the file's. check: called with the configuration, before
    weights are read where possible; may raise.
    """
    if isinstance(base, nn.Module):
        check_loaded(base, dtype)
        return base
    as_dtype(dtype)
    path = Path(base).expanduser()
    if path.is_file():
        return _load_gguf(path, dtype)
    config = check_config(read_source_config(base))
    if check is not None:
        check(config)
    model = read_whole(_name_to_load(base), dtype=dtype)
    check_loaded(model, "auto")
    return model


def read_config(base: str | Path) -> EquitapeConfig:
    """The configuration of a base, without its weights; an error for one that cannot be adapted."""
    config = read_source_config(base)
    return translate_config(config) if Path(base).expanduser().is_file() else check_config(config)


def read_source_config(base: str | Path) -> Any:
    """The configuration of a base as transformers has it."""
    path = Path(base).expanduser()
    if path.is_file():
        _check_gguf(path)
        with reading(path):
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    name = _name_to_load(base)
    with reading(base):
        return AutoConfig.from_pretrained(name)


@contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """Report any error of transformers as one sentence about the model of this name, without its own log.

    Damaged files fail deep inside transformers with every kind of error.
    """
    verbosity = get_verbosity()
    set_verbosity_error()
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        clear = isinstance(error, (ValueError, OSError, SafetensorError))
        # a few classes give the field in the first line and the reason in the next
        whole = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else ""
        reason = whole or (first_line(error) if clear else _wrong_config(name) or named_line(error))
        raise ValueError(f"Cannot read the model {str(name)!r} ({reason}).") from error
    finally:
        set_verbosity(verbosity)


def _wrong_config(name: str | Path) -> str:
    """What is wrong with a config.json that holds no settings at all; empty if it holds some."""
    path = Path(name).expanduser() / "config.json"
    wrong = path.is_file() and not isinstance(read_json(path), dict)
    return "its config.json is not a JSON object with settings; save the model again" if wrong else ""


def _name_to_load(base: str | Path) -> str:
    """The folder of a base or its name on the Hub, as transformers takes them."""
    path = Path(base).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            if (path / DESCRIPTION).is_file():
                raise ValueError(
                    f"The folder {str(base)!r} holds an adapter, and a base is a full model; write one with "
                    f"equitape.load_adapter(ITS_BASE, {str(base)!r}).save_pretrained(FOLDER)."
                )
            within = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"give the GGUF file, {str(path / within[0])!r}" if within else "give the folder of a full model"
            raise ValueError(f"The folder {str(base)!r} has no config.json; {hint}.")
        return str(path)
    if str(base).count("/") != 1 or str(base).startswith((".", "~", "/")):
        raise ValueError(
            f"There is no model at {str(base)!r}; give a folder with safetensors, a GGUF file, or a name on the Hub, "
            "OWNER/NAME."
        )
    return str(base)


def read_whole(name: str, **options: Any) -> PreTrainedModel:
    """AutoModelForCausalLM.from_pretrained that raises on missing weights and on wrong shapes."""
    with reading(name if "gguf_file" not in options else Path(name) / options["gguf_file"]):
        model, info = AutoModelForCausalLM.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        check_loading(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]))
        for weight, found, expected in sorted(info["mismatched_keys"]):
            raise ValueError(
                f"The weight {weight!r} has shape {list(found)}; its configuration requires {list(expected)}."
            )
        check_special_tokens(getattr(model, "generation_config", None))
    return model


def check_special_tokens(settings: Any) -> None:
    """Raise ValueError if a special token of a generation_config.json is not a token id, or a list of ids."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = getattr(settings, name, None)
        ids = given if isinstance(given, list) else [given]
        if given is not None and not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise ValueError(f"{name} of generation_config.json is {given!r}; it must be a token id or a list of them")


def _check_gguf(path: Path) -> None:
    if path.suffix != ".gguf":
        raise ValueError(f"{str(path)!r} is not a GGUF file; give a GGUF file or a model folder.")
    require_gguf(path)


def _load_gguf(path: Path, dtype: str | torch.dtype) -> PreTrainedModel:
    _check_gguf(path)
    from transformers import GgufConfig

    model = read_whole(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32 if dtype == "auto" else dtype,
        quantization_config=GgufConfig(dequantize=True),
    )
    # the weights are dequantized now and may be trained and saved
    model.config.__dict__.pop("quantization_config", None)
    check_loaded(model, "auto")
    return model


def require_gguf(path: Path) -> None:
    """Raise ValueError if the package gguf is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ValueError(
            f'Reading {path.name!r} needs the package gguf; install it with pip install "equitape[gguf]".'
        ) from None


def check_config(config: Any) -> EquitapeConfig:
    """The configuration as an EquitapeConfig; raises ValueError if it cannot be adapted."""
    method = getattr(config, "quantization_config", None)
    if method is not None:
        method = method if isinstance(method, dict) else method.to_dict()
        raise ValueError(
            f"The weights are quantized ({method.get('quant_method', 'unknown method')}) and cannot be trained; give "
            f"the unquantized model, or a GGUF file, which is dequantized."
        )
    return translate_config(config)


def check_loaded(model: Any, dtype: str | torch.dtype) -> None:
    """Raise ValueError for a model with quantized or offloaded weights, or without a language-modelling head."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"Cannot adapt a {type(model).__name__}; give a transformers model of the families "
            f"{', '.join(FAMILIES)} (for a PeftModel: model.merge_and_unload())."
        )
    translate_config(model.config)
    if not isinstance(getattr(model, "lm_head", None), nn.Module):
        raise ValueError(f"A {type(model).__name__} has no language-modelling head; load it with AutoModelForCausalLM.")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"The weight {name!r} is not in memory (offloaded by a device map); load the model on one device."
            )
        if parameter.dtype not in TRAINABLE_DTYPES:
            raise ValueError(
                f"The weight {name!r} is quantized ({parameter.dtype}) and cannot be trained; load the model in "
                f"bfloat16 or float32."
            )
        if dtype != "auto" and parameter.dtype != as_dtype(dtype):
            raise ValueError(f"The loaded model is in {parameter.dtype}, but dtype is {dtype}; use model.to(...).")
    foreign = [
        name
        for name, module in model.named_modules()
        if "proj" in name.rpartition(".")[2] and type(module) is not nn.Linear
    ]
    if foreign:
        kind = type(model.get_submodule(foreign[0])).__name__
        raise ValueError(
            f"{foreign[0]!r} is a {kind}, not a plain linear layer: the model is quantized or has an adapter. Load "
            f"the weights in bfloat16 or float32, or merge the adapter first."
        )


def as_dtype(dtype: str | torch.dtype) -> Any:
    """A torch dtype by name; "auto" stays."""
    found = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in (*TRAINABLE_DTYPES, "auto"):
        names = [str(each).removeprefix("torch.") for each in TRAINABLE_DTYPES]
        raise ValueError(f"Unknown dtype {str(dtype)!r}.{describe_choices(dtype, ['auto', *names])}")
    return found


def convert(
    source: PreTrainedModel, config: EquitapeConfig, seed: int = 0, model_class: type[Decoder] = EquitapeForCausalLM
) -> Decoder:
    """An Equitape decoder that shares the source's tensors; missing weights of the encoding are new.

    config: from `translate_config`, possibly with another encoding. seed: seed of the new weights.
    """
    implementation = source.config._attn_implementation
    assert isinstance(config.encoding, dict)
    if implementation not in ENCODINGS[config.encoding["kind"]].backends:
        implementation = "sdpa"
    if config.attention_softcap is not None:
        implementation = "eager"
    # allocate no memory and draw no random numbers for weights that the source has
    with torch.device("meta"), no_init_weights():
        model = model_class._from_config(config, attn_implementation=implementation)
    _place(model, split_fused(dict(source.named_parameters(remove_duplicate=False)), config))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    _make_missing(model, seed)
    model.config.dtype = model.dtype
    if source.can_generate():
        model.generation_config = source.generation_config
    return model.eval()


def _place(model: nn.Module, given: dict[str, Tensor]) -> None:
    """Assign tensors to the parameters of the same names."""
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            tensor = given.get(f"{prefix}.{leaf}")
            if parameter is None or tensor is None:
                continue
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"The weight '{prefix}.{leaf}' has shape {list(tensor.shape)}; its configuration requires "
                    f"{list(parameter.shape)}."
                )
            # a new parameter on the same memory, so that freezing it does not affect the source
            module._parameters[leaf] = nn.Parameter(tensor.detach())


def _make_missing(model: EquitapeForCausalLM, seed: int) -> None:
    """Initialize missing weights on the CPU in float32, for equal values on every device."""
    first = model.model.embed_tokens.weight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in model.named_modules():
            missing = [
                leaf for leaf, parameter in module._parameters.items() if parameter is not None and parameter.is_meta
            ]
            if not missing:
                continue
            if "encoding" not in name.split("."):
                raise ValueError(f"The source has no weight {name!r}; check that its files are complete.")
            for leaf in missing:
                module._parameters[leaf] = nn.Parameter(torch.empty(getattr(module, leaf).shape))
            with _kept_weights(module, missing):
                model._init_weights(module)
            for leaf in missing:
                parameter = getattr(module, leaf)
                parameter.data = parameter.data.to(device=first.device, dtype=first.dtype)


@contextmanager
def _kept_weights(module: nn.Module, missing: list[str]) -> Iterator[None]:
    """Keep weights that the source has: initialising a module also reaches its other weights and its parts."""
    kept = [
        (part, leaf, parameter)
        for part in module.modules()
        for leaf, parameter in part._parameters.items()
        if parameter is not None and not parameter.is_meta and not (part is module and leaf in missing)
    ]
    for part, leaf, parameter in kept:
        part._parameters[leaf] = nn.Parameter(torch.empty(parameter.shape))
    try:
        yield
    finally:
        for part, leaf, parameter in kept:
            part._parameters[leaf] = parameter


def fingerprint(source: nn.Module, config: EquitapeConfig) -> dict[str, Any]:
    """The identity of a base: sizes, rotary positions, and a digest of values spread over all weights.

    Values are rounded to bfloat16 first, so a base has the same fingerprint in float32 and bfloat16.
    """
    tensors = {
        name: parameter
        for name, parameter in source.named_parameters()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    architecture = {name: getattr(config, name) for name in FINGERPRINTED_FIELDS}
    # GGUF stores it in float32
    architecture["rms_norm_eps"] = float(torch.tensor(config.rms_norm_eps, dtype=torch.float32))
    architecture["encoding"] = config.encoding
    if not config.query_growth:
        # without growth its start has no effect
        architecture["query_growth_start"] = None
    return {"architecture": json.loads(json.dumps(architecture)), "weights": digest_of(tensors)}


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Digest of names, shapes and values spread over all tensors, rounded to bfloat16."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().reshape(-1)
        if len(flat) > RUNS * VALUES_IN_A_RUN:
            flat = flat[: len(flat) // RUNS * RUNS].view(RUNS, -1)[:, :VALUES_IN_A_RUN].reshape(-1)
        values = flat.to("cpu", torch.float32).to(torch.bfloat16)
        digest.update(f"{name} {list(tensors[name].shape)}".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def not_finite(model: nn.Module) -> list[str]:
    """Names of the weights with NaN or infinity."""
    weights = ((name, weight) for name, weight in model.named_parameters() if weight.is_floating_point())
    return [name for name, weight in weights if not bool(weight.isfinite().all())]
