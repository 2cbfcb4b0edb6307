"""equitape adapt."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

METHOD, TRAINING, SCORING = "Method", "Training", "Perplexity before and after"


def adapt(
    base: Annotated[str, typer.Argument(help="A folder with safetensors, or a GGUF file.")],
    method: Annotated[
        str | None,
        typer.Option(
            help="tape (the default), lora, tape+lora, longlora, theta, theta+lora or full.", rich_help_panel=METHOD
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; nothing is written without it.")] = None,
    save: Annotated[
        str | None,
        typer.Option(
            help="adapter (trained tensors only) or model (whole, LoRA merged). A model unless --data is given."
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Put this trained adapter on the base, to be saved as a whole model.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens the model is meant for; the base's when left out.", rich_help_panel=METHOD),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            help="Fit the new context into the trained one: linear or yarn interpolation.", rich_help_panel=METHOD
        ),
    ] = None,
    theta: Annotated[
        float | None,
        typer.Option(help="Rotary base; a hundred times the old one for the method theta.", rich_help_panel=METHOD),
    ] = None,
    train_embeddings: Annotated[
        bool | None,
        typer.Option(
            "--train-embeddings/--no-train-embeddings", help="Train token embeddings too.", rich_help_panel=METHOD
        ),
    ] = None,
    train_norms: Annotated[
        bool | None, typer.Option("--train-norms/--no-train-norms", help="Train norms too.", rich_help_panel=METHOD)
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(help="Rank of LoRA's updates; 8 when left out.", rich_help_panel=METHOD)
    ] = None,
    lora_alpha: Annotated[
        float | None, typer.Option(help="LoRA's scale, over its rank; 16 when left out.", rich_help_panel=METHOD)
    ] = None,
    lora_dropout: Annotated[
        float | None, typer.Option(help="Dropout before LoRA's updates.", rich_help_panel=METHOD)
    ] = None,
    lora_target: Annotated[
        list[str] | None,
        typer.Option(
            help="Layer that LoRA updates, repeatable: q_proj, k_proj, v_proj, o_proj, ...", rich_help_panel=METHOD
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a group of longlora; a quarter of the context when left out.", rich_help_panel=METHOD
        ),
    ] = None,
    tape: Annotated[
        list[str] | None, typer.Option(help="Option of TAPE as key=value, repeatable.", rich_help_panel=METHOD)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of a model saved whole: auto (the base's, the default), float32 or bfloat16.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text to train on: file, folder or archive; repeatable.", rich_help_panel=TRAINING),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder of the tokenizer; the base's when left out.", rich_help_panel=TRAINING)
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="Leave out documents shorter than this.", rich_help_panel=TRAINING)
    ] = None,
    whole_rows: Annotated[
        bool,
        typer.Option(
            "--whole-rows", help="Train only on rows that are one piece of one document.", rich_help_panel=TRAINING
        ),
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Steps to train.", rich_help_panel=TRAINING)] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to train on, instead of steps.", rich_help_panel=TRAINING)
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Rows in a step, all processes together; 8 when left out.", rich_help_panel=TRAINING),
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Micro-batches a step is split into.", rich_help_panel=TRAINING)
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Highest learning rate; 2e-5 where all weights train, else 2e-4.", rich_help_panel=TRAINING),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="After the warm-up: cosine (the default), linear or constant.", rich_help_panel=TRAINING),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            help="Share of the steps over which the rate grows; 0.05 when left out.", rich_help_panel=TRAINING
        ),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="AdamW's decay of matrices; none when left out.", rich_help_panel=TRAINING)
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="auto (bf16 on a GPU, the default), bf16 or fp32.", rich_help_panel=TRAINING)
    ] = None,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Save memory: compute activations twice.", rich_help_panel=TRAINING
        ),
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Train with torch.compile.", rich_help_panel=TRAINING)
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of new weights, of the order of data, of dropout; 0 when left out.", rich_help_panel=TRAINING
        ),
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.", rich_help_panel=TRAINING)] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations while training.", rich_help_panel=SCORING)
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH of text to score before and after; repeatable.", rich_help_panel=SCORING),
    ] = None,
    eval_lengths: Annotated[
        str | None,
        typer.Option(help="Lengths to score at, as 1024,4096; the context when left out.", rich_help_panel=SCORING),
    ] = None,
    eval_windows: Annotated[
        int | None,
        typer.Option(help="Windows of each text and length, 32 when left out; 0 takes all.", rich_help_panel=SCORING),
    ] = None,
    eval_stride: Annotated[
        int | None, typer.Option(help="Tokens between windows; their length when left out.", rich_help_panel=SCORING)
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for tokenized data.", rich_help_panel=TRAINING)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder --out.", rich_help_panel=TRAINING)
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs to read.")] = False,
) -> None:
    """Bring a pretrained model, leave with TAPE, LoRA, LongLoRA or another rotary base: the same outputs until trained.

    Without --data the model is converted, and what would train is shown. With --data it is trained on packed documents,
    scored before and after, and the adapter, the log, a plot of the loss and a model card are written to --out.

    On several devices: accelerate launch -m equitape adapt ...
    """
    from ..adapt.command import AdaptCommand, read_lengths, read_pairs, run

    try:
        command = AdaptCommand(
            base=base,
            adapt={
                "method": method,
                "context": context,
                "scaling": scaling,
                "theta": theta,
                "train_embeddings": train_embeddings,
                "train_norms": train_norms,
                "lora_rank": lora_rank,
                "lora_alpha": lora_alpha,
                "lora_dropout": lora_dropout,
                "lora_targets": lora_target,
                "group_size": group_size,
                "tape": read_pairs(tape, "--tape", as_yaml=True),
                "seed": seed,
            },
            finetune={
                "data": data,
                "tokenizer": tokenizer,
                "min_tokens": min_tokens,
                "whole_rows": whole_rows or None,
                "cache": str(cache) if cache is not None else None,
            },
            train={
                "steps": steps,
                "tokens": tokens,
                "batch_size": batch_size,
                "accumulation": accumulation,
                "learning_rate": learning_rate,
                "schedule": schedule,
                "warmup": warmup,
                "weight_decay": weight_decay,
                "precision": precision,
                "gradient_checkpointing": gradient_checkpointing or None,
                "compile": compile or None,
                "save_every": save_every,
                "eval_every": eval_every,
            },
            evaluation={
                "data": read_pairs(eval_data, "--eval-data"),
                "lengths": read_lengths(eval_lengths),
                "windows": eval_windows,
                "stride": eval_stride,
            },
            out=out,
            save=save,
            adapter=adapter,
            dtype=dtype,
            resume=resume,
        )
        report = run(command, Console(stderr=json))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        # nothing the user typed is wrong: the disk is full, or a file cannot be written
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    if json:
        typer.echo(to_json(report))
    if report["status"] != "done":
        raise typer.Exit(1)


def to_json(report: Any) -> str:
    """For programs; the option of the same name hides the module in the command."""
    import json

    return json.dumps(report, indent=1)
