"""Command-line options generated from settings classes, which define type, default and help of each option once."""

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from ..runs.errors import describe_stop, describe_system_error, is_disk_full, is_out_of_memory
from ..settings import (
    Settings,
    alternatives,
    default_of,
    field_help,
    is_required,
    kinds,
    literals,
    settings_class,
    show_default,
    type_hints,
)
from ..values import parse_pairs, parse_value, split_pair

MANY = 4
"""An option with at least this many choices lists them in its help, not in its metavar."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


@dataclass(frozen=True, kw_only=True)
class OptionsOf:
    """Marks a command parameter that expands into one option per setting and receives the given ones."""

    cls: type[Settings]
    panel: str | None = None
    """Panel title in the help."""
    prefix: str = ""
    """Prefix of option names: "eval" turns `lengths` into --eval-lengths."""
    only: tuple[str, ...] = ()
    """Settings that become options. Default: all."""
    without: tuple[str, ...] = ()
    """Settings that do not become options."""
    names: dict[str, str] = field(default_factory=dict)
    """Renamed options, for example {"lora_targets": "lora-target"}."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults shown in the help where they differ from the class's."""
    required: tuple[str, ...] = ()
    """Settings that the command cannot do without."""

    def option_name(self, name: str) -> str:
        """--name of a setting."""
        chosen = self.names.get(name, name.replace("_", "-"))
        return f"--{self.prefix}-{chosen}" if self.prefix else f"--{chosen}"

    def parameters(self) -> Iterator[tuple[str, str, Any]]:
        """(setting, parameter, annotation for typer) of every option."""
        hints, words = type_hints(self.cls), field_help(self.cls)
        for entry in fields(self.cls):
            if entry.name in (self.only or hints) and entry.name not in self.without:
                hint = hints[entry.name]
                default = self.defaults.get(entry.name, None if is_required(entry) else default_of(entry))
                text = describe(words.get(entry.name, ""), hint, default)
                annotation = self._annotation(entry.name, hint, text, default)
                yield entry.name, f"{self.prefix}_{entry.name}" if self.prefix else entry.name, annotation

    def _annotation(self, name: str, hint: Any, text: str, default: Any) -> Any:
        options = [self.option_name(old) for old in (name, *(k for k, new in self.cls.aliases.items() if new == name))]
        listed = {tuple, dict} & set(kinds(hint)) or settings_class(hint)
        if bool in kinds(hint) and not listed:
            # a flag that is off by default needs no --no-... form
            flag = options[0] if default is False else f"{options[0]}/--no-{options[0][2:]}"
            return Annotated[bool | None, typer.Option(flag, *options[1:], help=text, rich_help_panel=self.panel)]
        metavar = "KEY=VALUE" if dict in kinds(hint) or settings_class(hint) else _metavar(hint)
        option = typer.Option(*options, help=text, metavar=metavar, rich_help_panel=self.panel)
        kind = list[str] if listed else str
        return Annotated[kind if name in self.required else kind | None, option]

    def read(self, name: str, value: Any) -> Any:
        """Parse the typed text of a setting."""
        hint, option = type_hints(self.cls)[name], self.option_name(name)
        if isinstance(value, bool):
            return value
        if settings_class(hint):
            return parse_pairs(value, option, "key=value")
        if dict in kinds(hint):
            return _read_dictionary(value, hint, option)
        if tuple in kinds(hint):
            return _read_list(value, hint, option)
        return value if kinds(hint)[0] is str or literals(hint) else parse_value(value, option)


def _metavar(hint: Any) -> str:
    choices = choices_of(hint)
    if choices:
        return "|".join(choices) if len(choices) < MANY else "NAME"
    kind = kinds(hint)[0]
    if kind is tuple:
        part = next(get_args(part) for part in alternatives(hint) if get_origin(part) is tuple)[0]
        return METAVARS.get(kinds(part)[0], "TEXT")
    return METAVARS.get(kind, "PATH" if getattr(kind, "__name__", "") == "Path" else "TEXT")


def choices_of(hint: Any) -> list[str]:
    """The choices of a setting, if it is a choice."""
    return [str(choice) for kind in alternatives(hint) for choice in literals(kind)]


def _read_list(values: list[str], hint: Any, option: str) -> list[Any]:
    part = next(get_args(kind) for kind in alternatives(hint) if get_origin(kind) is tuple)[0]
    if str in kinds(part) or literals(part):
        return list(values)
    read = [parse_value(value, option) for value in values]
    return [item for value in read for item in (value if isinstance(value, list) else [value])]


def _read_dictionary(values: list[str], hint: Any, option: str) -> dict[str, Any]:
    if get_args(hint)[1] is not str:
        return parse_pairs(values, option, "key=value")
    pairs = [split_pair(value, f"{option} name=path") for value in values]
    twice = sorted({key for key, _ in pairs if [other for other, _ in pairs].count(key) > 1})
    if twice:
        raise ValueError(f"{option} sets {twice[0]!r} twice; give it once.")
    return dict(pairs)


def describe(words: str, hint: Any, default: Any) -> str:
    """The help of an option: meaning, choices, whether it is repeatable, default."""
    if len(choices_of(hint)) >= MANY:
        words = f"{words} One of {', '.join(choices_of(hint))}."
    if {tuple, dict} & set(kinds(hint)) or settings_class(hint):
        words = f"{words} Repeatable."
    shown = show_default(default)
    if shown and "Default:" not in words and not isinstance(default, bool):
        words = f"{words} Default: {shown}."
    # square brackets would be read as markup
    return words.replace("[", "\\[")


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: expand parameters marked by `OptionsOf`."""
    groups: dict[str, OptionsOf] = {}
    sources: dict[str, tuple[str, str]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        marks = [mark for mark in get_args(parameter.annotation)[1:] if isinstance(mark, OptionsOf)]
        if not marks:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = marks[0]
        for name, option, annotation in marks[0].parameters():
            sources[option] = parameter.name, name
            default = inspect.Parameter.empty if name in marks[0].required else None
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(option, keyword, default=default, annotation=annotation))

    @wraps(command)
    def run(**given: Any) -> None:
        collected: dict[str, dict[str, Any]] = {group: {} for group in groups}
        for option, (group, name) in sources.items():
            value = given.pop(option)
            if value is not None and value != []:
                collected[group][name] = groups[group].read(name, value)
        command(**given, **collected)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__dict__["__wrapped__"]
    return run


@contextmanager
def one_sentence() -> Iterator[None]:
    """Report an invalid value as a usage error; a full disk, full memory or an unreadable file as one line."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if is_disk_full(error):
            sentence = "The disk is full; free some space, then run the command again."
        elif is_out_of_memory(error):
            sentence = "Out of memory; use a smaller model, or fewer or shorter inputs."
        elif isinstance(error, ValueError):
            raise typer.BadParameter(str(error)) from None
        elif isinstance(error, RecursionError):
            raise typer.BadParameter("A file is nested too deeply to be read.") from None
        elif isinstance(error, OSError):
            sentence = describe_system_error(error)
        else:
            raise
        typer.echo(f"Error: {sentence}", err=True)
        raise typer.Exit(1) from None


def in_one_sentence(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: errors that a user can do something about end in one sentence."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with one_sentence():
            command(*args, **kwargs)

    return run


@contextmanager
def keeping(describe_kept: Callable[[], str], *, resume: bool, memory: str = "") -> Iterator[None]:
    """End an interruption or a full disk with one line: what is kept, and the command that continues.

    describe_kept: makes a sentence. resume: whether the command needs --resume to continue. memory: what to say where
    the memory is full, which the same command would only meet again.
    """
    try:
        yield
    except KeyboardInterrupt:
        reason, code = "Interrupted.", 130
    except Exception as error:
        if memory and is_out_of_memory(error):
            typer.echo(memory, err=True)
            raise typer.Exit(1) from None
        if not is_disk_full(error):
            raise
        reason, code = "The disk is full; free some space.", 1
    else:
        return
    # of several processes, only the main one prints
    if os.environ.get("RANK", "0") == "0":
        typer.echo(describe_stop(reason, describe_kept(), resume=resume), err=True)
    raise typer.Exit(code)


def named_folder(given: str) -> tuple[str, Path]:
    """Parse NAME=FOLDER, or FOLDER, which is named after its last part."""
    name, equals, folder = given.partition("=")
    if not equals or Path(given).exists():
        return Path(given).resolve().name, Path(given)
    return name, Path(folder)


def print_json(content: Any, indent: int = 1) -> None:
    """Print JSON on stdout."""
    typer.echo(json.dumps(content, indent=indent))


def table_of(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, *, numbers: bool = False
) -> Table:
    """A table for the terminal. numbers: align all columns but the first on the right."""
    table = Table(title=None if title is None else escape(title))
    for index, column in enumerate(columns):
        table.add_column(escape(column), overflow="fold", justify="right" if numbers and index else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


class RecipeCommand(TyperCommand):
    """A command that takes a recipe. Its help ends with the recipe keys."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from ..training.recipe import recipe_help

        self.epilog = recipe_help().replace("[", "\\[")
        super().format_help(ctx, formatter)
