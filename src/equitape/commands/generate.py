"""equitape generate and equitape chat."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from ..settings import Ge, Positive, Settings
from .options import OptionsOf, takes_settings

CHAT_TOKENS = 200

ModelName = Annotated[str, typer.Argument(help="Folder of a model, run or adapter, a GGUF file, or a name on the Hub.")]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Settings):
    """The options of both commands."""

    base: str | None = None
    """Show the answers of this model side by side; for an adapter, the model it was trained on."""
    max_tokens: Positive = 100
    """Most tokens to generate."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """0 takes the most likely token; higher samples more freely."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of sampling."""
    tokenizer: str | None = None
    """'bytes', or a folder. Default: the model's own."""
    dtype: str = "auto"
    """auto (the file's), float32, bfloat16 or float16."""
    device: str | None = None
    """For example cuda:1 or cpu. Default: a GPU where there is one."""


@takes_settings
def generate(
    model: ModelName,
    given: Annotated[dict[str, Any], OptionsOf(cls=GenerateOptions)],
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue. Default: standard input.", show_default=False)
    ] = None,
) -> None:
    """Generate text from a prompt, with one model or with two side by side."""
    options = GenerateOptions.parse(given, "generate")
    text = sys.stdin.read() if prompt is None else prompt
    if not text:
        raise ValueError("The prompt is empty; give some text to continue.")
    show({name: write(*writer, text, options) for name, writer in load_writers(model, options).items()}, Console())


@takes_settings
def chat(
    model: ModelName,
    given: Annotated[dict[str, Any], OptionsOf(cls=GenerateOptions, defaults={"max_tokens": CHAT_TOKENS})],
) -> None:
    """Chat with a model, or with two side by side. An empty line or Ctrl-D ends the conversation.

    Without a chat template in the tokenizer, the model continues the text so far.
    """
    console = Console()
    options = GenerateOptions.parse({"max_tokens": CHAT_TOKENS, **given}, "chat")
    writers = load_writers(model, options)
    talks: dict[str, list[dict[str, str]]] = {name: [] for name in writers}
    while True:
        try:
            line = typer.prompt("you", default="", show_default=False)
        except typer.Abort:
            return
        if not line:
            return
        answers = {}
        for name, writer in writers.items():
            talks[name].append({"role": "user", "content": line})
            # a template writes the special tokens itself
            bare = has_template(writer[1])
            answers[name] = write(*writer, as_prompt(writer[1], talks[name]), options, bare=bare)
            talks[name].append({"role": "assistant", "content": answers[name]})
        show(answers, console)


def load_writers(model: str, options: GenerateOptions) -> dict[str, tuple[Any, Any]]:
    """Models and tokenizers by the names to show."""
    from ..pretrained.loading import choose_device, is_adapter, load_model, load_tokenizer_of

    place = choose_device(options.device)
    base = options.base
    under = base if is_adapter(model) else None
    names = [(model, under)] if base is None else [(base, None), (model, under)]
    writers = {}
    for name, below in names:
        loaded = load_model(name, options.dtype, below, as_ours=False).to(place)
        tokenizer = load_tokenizer_of(name, below, options.tokenizer)
        label = Path(name).name or name
        writers[name if label in writers else label] = loaded, tokenizer
    return writers


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def as_prompt(tokenizer: Any, talk: list[dict[str, str]]) -> str:
    """The conversation as text for the model to continue."""
    if has_template(tokenizer):
        return tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    return "".join(f"{turn['content']}\n" for turn in talk)


def write(model: Any, tokenizer: Any, text: str, options: GenerateOptions, bare: bool = False) -> str:
    """The continuation of a text. bare: without the special tokens that the tokenizer puts in front of a text."""
    import torch
    from transformers import set_seed

    set_seed(options.seed)
    inputs = tokenizer(text, add_special_tokens=not bare, return_tensors="pt", return_token_type_ids=False)
    inputs = inputs.to(model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("The prompt has no tokens; give some text to continue.")
    sampling: dict[str, Any] = {"max_new_tokens": options.max_tokens, "do_sample": options.temperature > 0}
    if options.temperature > 0:
        sampling["temperature"] = options.temperature
    end = model.generation_config.eos_token_id
    pad = model.generation_config.pad_token_id
    if pad is None and end is not None:
        sampling["pad_token_id"] = end[0] if isinstance(end, list) else end
    with torch.no_grad():
        written = model.generate(**inputs, **sampling, logits_processor=[refuse_nan])
    return tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def refuse_nan(ids: Any, scores: Any) -> Any:
    """The scores of the next token; raises ValueError for NaN, which would make any token the most likely one."""
    if scores.isnan().any():
        raise ValueError(
            "The model gives NaN instead of scores: its weights have NaN or infinity, or sums overflow its dtype. Try "
            "--dtype float32, and run `equitape check` for details."
        )
    return scores


def show(answers: dict[str, str], console: Console) -> None:
    """Print one answer as plain text, several side by side."""
    if len(answers) == 1:
        typer.echo(next(iter(answers.values())))
        return
    width = max(console.width // len(answers) - 1, 20)
    panels = [Panel(escape(answer), title=escape(name), width=width) for name, answer in answers.items()]
    console.print(Columns(panels, padding=0))
