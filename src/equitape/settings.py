"""Settings: frozen dataclasses that define type, default, limits and help of each setting once.

A field's annotation gives its type, with limits such as `Annotated[int, Ge(1)]` and choices such as
`Literal["a", "b"]`. The docstring below it is its help. Recipes, command-line options and tables in the documentation
are generated from these. pydantic checks values from `parse` and from the constructor. It rejects NaN and infinity in
float fields unless the annotation is `Annotated[float, AllowInfNan(True)]`.
"""

import ast
import inspect
import logging
import math
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin
from typing import get_type_hints as read_type_hints

from annotated_types import Ge, Gt, Le, Len, Lt

from .registry import describe_choices
from .values import Commas

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = [
    "Field", "Ge", "Gt", "Le", "Len", "Lt", "OrOne", "Positive", "Settings", "Share", "describe_settings",
    "field_help", "list_fields",
]  # fmt: skip

logger = logging.getLogger(__name__)

Positive = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0), Le(1)]


class OrOne:
    """Marks a list that may be given as its only value, as in `lengths=64`; not where 3 could mean three of them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of all settings. Subclasses are frozen, keyword-only dataclasses.

    `__post_init__` of a subclass runs after each field was checked; put checks that involve several fields there.
    """

    # not annotated: an annotation would make it a setting
    aliases = dict[str, str]()
    """Old names of settings and their replacements. `parse` accepts both and logs one note per old name."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = cls.__dict__.get("__post_init__")

        def check_then_run(self: Settings) -> None:
            if type(self) is cls:
                self._check_fields()
            if own is not None:
                own(self)
            else:
                super(cls, self).__post_init__()  # type: ignore[misc]

        cls.__post_init__ = check_then_run  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Override for checks that involve several fields."""

    def _check_fields(self) -> None:
        hints = type_hints(type(self))
        for entry in fields(self):
            value = getattr(self, entry.name)
            checked = check_value(value, hints[entry.name], entry.name)
            if checked is not value:
                object.__setattr__(self, entry.name, checked)

    @classmethod
    def parse(cls, given: dict[str, Any], owner: str) -> Self:
        """Build settings from plain data. `owner` names them in errors, for example "Encoding 'tape'"."""
        hints = type_hints(cls)
        values: dict[str, Any] = {}
        for key, value in given.items():
            name = cls.aliases.get(key, key)
            if name not in hints:
                raise ValueError(f"{owner} has no option {key!r}.{describe_choices(key, hints) if hints else ''}")
            if name in values:
                raise ValueError(f"{owner}: {name} is set twice, the second time as {key}; set it once.")
            if name != key:
                note_alias(owner, key, name)
            inner = owner.rpartition(": ")[2].replace(".", "_").isidentifier()
            where = f"{owner}{'.' if inner else ': '}{name}"
            nested = settings_class(hints[name])
            if nested is not None and isinstance(value, dict):
                values[name] = nested.parse(value, where)
            else:
                values[name] = check_value(value, hints[name], where)
        missing = [entry.name for entry in fields(cls) if is_required(entry) and entry.name not in values]
        if missing:
            raise ValueError(f"{owner} needs {' and '.join(missing)}.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data without None values."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@cache
def note_alias(owner: str, old: str, new: str) -> None:
    """Log once that a setting was renamed."""
    logger.warning("%s: %s is now called %s; the old name still works.", owner, old, new)


_hints: dict[type[Settings], dict[str, Any]] = {}


def type_hints(cls: type[Settings]) -> dict[str, Any]:
    """Annotations of all fields including limits, in declaration order."""
    if cls not in _hints:
        hints = read_type_hints(cls, include_extras=True)
        _hints[cls] = {entry.name: hints[entry.name] for entry in fields(cls)}
    return _hints[cls]


def is_required(entry: Any) -> bool:
    """Whether a dataclass field has no default."""
    return entry.default is MISSING and entry.default_factory is MISSING


def check_value(value: Any, hint: Any, where: str) -> Any:
    """Convert a value to its annotation: lists become tuples, whole numbers become floats where needed."""
    from pydantic import ValidationError

    if isinstance(value, Commas) and not {tuple, Any} & set(kinds(hint)):
        value = value.text
    try:
        return adapter(hint).validate_python(value)
    except ValidationError:
        pass
    shown = value.text if isinstance(value, Commas) else value
    allowed = describe_type(hint, finite=isinstance(value, float) and not math.isfinite(value))
    choices = [choice for kind in alternatives(hint) for choice in literals(kind)]
    typed = value if isinstance(value, (list, tuple)) else [value]
    wrong = [item for item in typed if isinstance(item, str) and item not in choices]
    near = describe_choices(wrong[0], map(str, choices)).partition(" Allowed:")[0] if wrong and choices else ""
    raise ValueError(f"{where} is {shown!r}; it must be {allowed}.{near}")


@cache
def adapter(hint: Any) -> "TypeAdapter[Any]":
    """pydantic's validator of an annotation, cached."""
    from pydantic import ConfigDict, TypeAdapter

    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(for_pydantic(hint), config=config)


def for_pydantic(hint: Any) -> Any:
    """The annotation for pydantic: strict types, but lists for tuples, text for paths, 1e6 for 1000000."""
    from pydantic import BeforeValidator, Strict

    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        listed = [BeforeValidator(as_list)] if any(part is OrOne for part in parts) else []
        return Annotated[for_pydantic(parts[0]), *parts[1:], *listed]
    if origin in (Union, UnionType):
        return Union[tuple(map(for_pydantic, parts))]  # noqa: UP007  built from a tuple
    if hint is tuple or origin is tuple:
        inner = tuple[tuple(part if part is ... else for_pydantic(part) for part in parts)] if parts else tuple  # type: ignore[misc]
        return Annotated[inner, Strict(False), BeforeValidator(refuse_sets)]
    if origin is dict:
        return dict[for_pydantic(parts[0]), for_pydantic(parts[1])]  # type: ignore[misc]
    if hint is int:
        return Annotated[int, BeforeValidator(whole_number)]
    if hint is Path:
        return Annotated[Path, Strict(False)]
    if isinstance(hint, type) and issubclass(hint, Settings):
        return Annotated[Any, BeforeValidator(partial(require_instance, cls=hint))]
    return hint


def whole_number(value: Any) -> Any:
    """1e6 as 1000000."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_list(value: Any) -> Any:
    """A single number or text as a list of it."""
    return [value] if isinstance(value, (int, float, str)) else value


def refuse_sets(value: Any) -> Any:
    """Accept only ordered containers as tuples."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("not a list")
    return value


def require_instance(value: Any, cls: type[Settings]) -> Any:
    """Accept nested settings that are already parsed."""
    if not isinstance(value, cls):
        raise ValueError(f"not a {cls.__name__}")
    return value


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    if get_origin(hint) is Annotated and get_origin(get_args(hint)[0]) in (Union, UnionType):
        return alternatives(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def kinds(hint: Any) -> list[Any]:
    """The plain types of an annotation: [int, NoneType] for `Annotated[int, Ge(1)] | None`."""
    bare = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in alternatives(hint)]
    return [get_origin(kind) or kind for kind in bare]


def literals(hint: Any) -> tuple[Any, ...]:
    """The choices of a Literal, or of a tuple of Literals."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for part in get_args(hint) for choice in literals(part))


def settings_class(hint: Any) -> type[Settings] | None:
    """The class of nested settings in an annotation, or None."""
    return next((kind for kind in kinds(hint) if isinstance(kind, type) and issubclass(kind, Settings)), None)


def describe_type(hint: Any, finite: bool = False) -> str:
    """Describe the allowed values: "a whole number of 1 or more, or null"."""
    words = [_describe_kind(kind, finite) for kind in alternatives(hint) if kind is not NoneType]
    text = " or ".join(dict.fromkeys(words))
    return f"{text}, or null" if NoneType in alternatives(hint) else text


def _describe_kind(kind: Any, finite: bool) -> str:
    limits: tuple[Any, ...] = ()
    if get_origin(kind) is Annotated:
        kind, *rest = get_args(kind)
        limits = tuple(rest)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        choices = [repr(part) if isinstance(part, str) else str(part).lower() for part in parts]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if kind is tuple or origin in (tuple, list):
        listed = _describe_list(parts, finite)
        filled = any(isinstance(limit, Len) for limit in limits)
        return listed.replace("a list", "a list that is not empty", 1) if filled else listed
    if kind is dict or origin is dict:
        return "a dictionary, for example {key: value}"
    if isinstance(kind, type) and issubclass(kind, Settings):
        return "a dictionary of settings"
    number = "a finite number" if finite else "a number"
    words = {int: "a whole number", float: number, bool: "true or false", str: "text", Path: "a path", Any: "anything"}
    return words.get(kind, getattr(kind, "__name__", str(kind))) + _describe_limits(limits)


def _describe_list(parts: tuple[Any, ...], finite: bool) -> str:
    of = [part for part in parts if part is not ...]
    if not of or of[0] is Any:
        return "a list, for example [1, 2]"
    inner = _describe_kind(of[0], finite)
    if parts[-1] is not ... and len(of) > 1:
        return f"a list of {len(of)}, each {inner}"
    return f"a list, for example [{'1, 2' if int in kinds(of[0]) or float in kinds(of[0]) else 'a, b'}], each {inner}"


def _describe_limits(limits: Iterable[Any]) -> str:
    low = next((limit for limit in limits if isinstance(limit, (Ge, Gt))), None)
    high = next((limit for limit in limits if isinstance(limit, (Le, Lt))), None)
    if high is None:
        return f" of {low.ge} or more" if isinstance(low, Ge) else f" above {low.gt}" if low else ""
    most = high.le if isinstance(high, Le) else high.lt
    end = f"{most:,}" if isinstance(most, int) else f"{most:g}"
    if isinstance(low, Ge):
        return f" from {low.ge} to {'' if isinstance(high, Le) else 'below '}{end}"
    above = f" above {low.gt} and" if low else ""
    return f"{above} {'at most' if isinstance(high, Le) else 'below'} {end}"


class Field(NamedTuple):
    """One setting for help and tables."""

    name: str
    """Dotted name: train.steps."""
    default: str
    """Empty if there is no default or it is null."""
    help: str
    hint: Any
    """The annotation."""


def list_fields(cls: type[Settings], prefix: str = "") -> list[Field]:
    """Every setting of a class; nested settings follow the one they belong to. prefix: of their names."""
    hints, words, found = type_hints(cls), field_help(cls), []
    for entry in fields(cls):
        nested = settings_class(hints[entry.name])
        name = f"{prefix}{entry.name}"
        default = "" if nested or is_required(entry) else show_default(default_of(entry))
        found.append(Field(name, default, words.get(entry.name, ""), hints[entry.name]))
        found += list_fields(nested, f"{name}.") if nested else []
    return found


def default_of(entry: Any) -> Any:
    """The default of a dataclass field."""
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def show_default(value: Any) -> str:
    """A default as text; empty for null and empty values."""
    if value is None or value in ("", (), {}):
        return ""
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def field_help(cls: type[Settings]) -> dict[str, str]:
    """The docstring below each field by name, including base classes; empty without source files."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if issubclass(base, Settings)]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):
            continue
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def describe_settings(cls: type[Settings]) -> dict[str, Any]:
    """Every setting with its default, in declaration order."""
    defaults = cls()
    described: dict[str, Any] = {}
    for entry in fields(cls):
        value = getattr(defaults, entry.name)
        described[entry.name] = describe_settings(type(value)) if isinstance(value, Settings) else value
    return described
