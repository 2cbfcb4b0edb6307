"""Help on the fields of a recipe, made from the dataclasses and the docstrings below their fields."""

import ast
import inspect
import textwrap
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..settings import Settings
from .recipe import Recipe, available_recipes


def describe_fields(cls: type[Settings]) -> dict[str, str]:
    """The docstring below every field of a dataclass, by its name."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def list_fields(cls: type[Settings] = Recipe, prefix: str = "") -> list[tuple[str, str, str]]:
    """(dotted name, default, description) of every field, nested ones behind their parent."""
    hints, words = get_type_hints(cls), describe_fields(cls)
    rows = []
    for entry in fields(cls):
        kind = hints[entry.name]
        nested = next((part for part in _alternatives(kind) if is_dataclass(part)), None)
        name = f"{prefix}{entry.name}"
        rows.append((name, "" if nested else _default(entry), words.get(entry.name, "")))
        if nested:
            rows += list_fields(nested, f"{name}.")  # type: ignore[arg-type]
    return rows


def recipe_help() -> str:
    """A paragraph a field, as the help of a command shows it."""
    # no square brackets, which would be read as a style
    lines = [f"{name}{f' = {default}' if default else ''}: {words}" for name, default, words in list_fields()]
    shipped = f"Recipes that come with equitape: {', '.join(available_recipes())}."
    return "\n\n".join([shipped, "Fields of a recipe, each with its default, to set with key=value:", *lines])


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _default(entry: "Field[Any]") -> str:
    value = entry.default if entry.default_factory is MISSING else entry.default_factory()
    if value is MISSING or value is None or value in ("", (), {}):
        return ""
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
