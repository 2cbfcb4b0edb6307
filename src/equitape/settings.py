"""Settings: keyword-only dataclasses made from plain dictionaries, unknown keys refused."""

import types
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from .registry import describe_choices


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the options of encodings and tasks and of the parts of recipes. Subclasses check in `__post_init__`."""

    @classmethod
    def parse(cls, given: dict[str, Any], owner: str) -> Self:
        """Build the settings from a dictionary; `owner` names whose they are in error messages."""
        hints = get_type_hints(cls)
        values = {}
        for key, value in given.items():
            if key not in hints:
                raise ValueError(f"{owner} has no option {key!r}.{describe_choices(key, hints) if hints else ''}")
            values[key] = _convert(value, hints[key], f"{owner}: option {key!r}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON; settings left at None are left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Check one value against its annotation; nested options come as dictionaries."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in alternatives:
        if is_dataclass(kind) and isinstance(value, dict):
            return kind.parse(value, where)  # type: ignore[union-attr]
        if kind is type(None) and value is None:
            return None
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        plain = get_origin(kind) or kind
        if isinstance(plain, type) and isinstance(value, plain) and (plain is bool or not isinstance(value, bool)):
            return value
        if plain is tuple and isinstance(value, list):
            return tuple(value)
    names = " or ".join(_describe(kind) for kind in alternatives)
    raise ValueError(f"{where} is {value!r}, a {type(value).__name__}; it must be {names}.")


def _describe(kind: Any) -> str:
    """What a value of a type looks like where it is written."""
    plain = get_origin(kind) or kind
    return "a list, as [1, 2]" if plain is tuple else getattr(plain, "__name__", str(plain))


def describe_settings(cls: type[Settings]) -> dict[str, Any]:
    """Every setting with its default, in the order of declaration."""
    defaults = cls()
    described: dict[str, Any] = {}
    for entry in fields(cls):
        value = getattr(defaults, entry.name)
        described[entry.name] = describe_settings(type(value)) if isinstance(value, Settings) else value
    return described
