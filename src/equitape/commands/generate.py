"""equitape generate and equitape chat."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from .options import one_sentence

ModelName = Annotated[str, typer.Argument(help="Folder of a model, run or adapter, a GGUF file, or a name on the Hub.")]
Base = Annotated[
    str | None,
    typer.Option(help="Also show this model's answers, side by side. For an adapter: the model it was trained on."),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 decodes greedily.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling.")]
TokenizerName = Annotated[
    str | None, typer.Option(help="'bytes', or a folder. Default: the model's own.", show_default=False)
]
Dtype = Annotated[str, typer.Option(help="auto (the file's), float32, bfloat16 or float16.")]
Device = Annotated[
    str | None, typer.Option(help="For example cuda:1 or cpu. Default: a GPU if available.", show_default=False)
]


def generate(
    model: ModelName,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue. Default: standard input.", show_default=False)
    ] = None,
    base: Base = None,
    max_tokens: MaxTokens = 100,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    tokenizer: TokenizerName = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Generate text from a prompt, with one model or with two side by side."""
    with one_sentence():
        text = sys.stdin.read() if prompt is None else prompt
        if not text:
            raise ValueError("The prompt is empty; give some text to continue.")
        writers = load_writers(model, base, tokenizer, dtype, device)
        options = sampling(max_tokens, temperature)
        show({name: write(*writer, text, options, seed) for name, writer in writers.items()}, Console())


def chat(
    model: ModelName,
    base: Base = None,
    max_tokens: MaxTokens = 200,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    tokenizer: TokenizerName = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Chat with a model, or with two side by side. An empty line or Ctrl-D ends the conversation.

    Without a chat template in the tokenizer, the model continues the text so far.
    """
    console = Console()
    with one_sentence():
        writers = load_writers(model, base, tokenizer, dtype, device)
        options = sampling(max_tokens, temperature)
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
                answers[name] = write(*writer, as_prompt(writer[1], talks[name]), options, seed)
                talks[name].append({"role": "assistant", "content": answers[name]})
            show(answers, console)


def load_writers(
    model: str, base: str | None, tokenizer: str | None, dtype: str, device: str | None
) -> dict[str, tuple[Any, Any]]:
    """Models and tokenizers by display name."""
    from ..pretrained.loading import choose_device, is_adapter, load_model, load_tokenizer_of

    place = choose_device(device)
    under = base if is_adapter(model) else None
    names = [(model, under)] if base is None else [(base, None), (model, under)]
    writers = {}
    for name, below in names:
        loaded = load_model(name, dtype, below, as_ours=False).to(place)
        words = load_tokenizer_of(name, below, tokenizer)
        label = Path(name).name or name
        writers[name if label in writers else label] = loaded, words
    return writers


def sampling(max_tokens: int, temperature: float) -> dict[str, Any]:
    """Options of transformers' `generate`."""
    if temperature == 0:
        return {"max_new_tokens": max_tokens, "do_sample": False}
    return {"max_new_tokens": max_tokens, "do_sample": True, "temperature": temperature}


def as_prompt(tokenizer: Any, talk: list[dict[str, str]]) -> str:
    """The conversation as text for the model to continue."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    return "".join(f"{turn['content']}\n" for turn in talk)


def write(model: Any, tokenizer: Any, text: str, options: dict[str, Any], seed: int) -> str:
    """The continuation of a text."""
    import torch
    from transformers import set_seed

    set_seed(seed)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("The prompt has no tokens; give some text to continue.")
    end = model.generation_config.eos_token_id
    pad = model.generation_config.pad_token_id
    if pad is None and end is not None:
        options = {**options, "pad_token_id": end[0] if isinstance(end, list) else end}
    with torch.no_grad():
        written = model.generate(**inputs, **options)
    return tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def show(answers: dict[str, str], console: Console) -> None:
    """Print one answer as plain text, several side by side."""
    if len(answers) == 1:
        typer.echo(next(iter(answers.values())))
        return
    width = max(console.width // len(answers) - 1, 20)
    panels = [Panel(escape(answer), title=escape(name), width=width) for name, answer in answers.items()]
    console.print(Columns(panels, padding=0))
