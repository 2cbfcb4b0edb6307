"""Parsing of typed values: YAML files, and key=value on the command line."""

import re
import shlex
from typing import Any

import yaml

COMMAS = re.compile(r"[^\s,\[\]{}'\"]+(,[^\s,\[\]{}'\"]+)*,?")
"""Words separated or ended by commas, without brackets, quotes or spaces."""


class Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number and a repeated key is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


# a copy, since SafeLoader shares its table with other loaders
Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class Commas(list):
    """Parse a list typed without brackets, as in `encodings=rope,tape`. Settings that take text use `text` instead."""

    def __init__(self, text: str, parts: list[Any]):
        super().__init__(parts)
        self.text = text


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML to plain data; errors are one line."""
    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f", line {place.line + 1}" if place else ""
        raise ValueError(f"{where}{line} is not valid YAML: {getattr(error, 'problem', None) or error}.") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to parse as YAML.") from None


def parse_value(text: str, where: str) -> Any:
    """Parse a command-line value: YAML, or a list without brackets."""
    if "," in text and COMMAS.fullmatch(text):
        return Commas(text, [parse_yaml(part, where) for part in text.split(",") if part])
    return parse_yaml(text, where)


def split_pair(text: str, example: str) -> tuple[str, str]:
    """Split key=value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"Cannot parse {text!r}; write key=value, for example {example}.")
    return key, value


def parse_pairs(texts: list[str] | tuple[str, ...], option: str, example: str) -> dict[str, Any]:
    """Parse an option given as key=value, possibly repeated."""
    pairs: dict[str, Any] = {}
    for text in texts:
        key, value = split_pair(text, f"{option} {example}")
        if not value:
            raise ValueError(f"{option} {text} has no value; write key=value, for example {option} {example}.")
        if key in pairs:
            raise ValueError(f"{option} sets {key!r} twice; give it once.")
        pairs[key] = parse_value(value, f"The value of {key}")
    return pairs


def parse_encoding_words(text: str) -> tuple[str, dict[str, Any]]:
    """(kind, options) of --encoding: a kind and key=value words; values with spaces are quoted as in a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"Cannot parse --encoding {text!r}: {error}; close every quote.") from None
    if not words:
        raise ValueError("--encoding is empty; write for example --encoding tape.")
    options = parse_pairs(words[1:], "--encoding", "'tape layers=[0]'")
    if "kind" in options:
        raise ValueError(f"--encoding {text!r} names two kinds; write the kind first, without kind=.")
    return words[0], options


def set_value(content: dict[str, Any], override: str) -> None:
    """Apply "a.b=value" to nested dictionaries."""
    path, text = split_pair(override, "train.steps=100")
    keys = path.split(".")
    if not all(keys):
        raise ValueError(f"Cannot parse {override!r}; write key=value, for example train.steps=100.")
    place = content
    for depth, key in enumerate(keys[:-1]):
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise ValueError(f"Cannot set {path}: {'.'.join(keys[: depth + 1])} is {place!r}, not a dictionary.")
    place[keys[-1]] = parse_value(text, f"The value of {path}")
