"""The columns of the tables: other ways to extend, by their names."""

from ..adapt.settings import train_defaults
from ..pretrained.settings import AdaptSettings
from .methods import chosen_method, split_method
from .settings import COMPARATORS, EVERY_COMPARATOR, UNTRAINED, WITHOUT_JUMPS, ExtendSettings, split_comparator

LORA = {"lora_rank": None, "lora_alpha": None, "lora_targets": ()}


def comparator_settings(name: str, settings: ExtendSettings, base_growth: float = 0.0) -> ExtendSettings:
    """The settings of a comparator: those of the extension, but for what its name says.

    base_growth: the base's `query_growth`, which columns without training keep.

    A learning rate and options of LoRA and TAPE that are given for the extension hold for comparators of the same kind.
    """
    way, changes = split_comparator(name)
    given = {**settings.to_dict(), "scaling": None, "theta": None, "compare": ()}
    if way in UNTRAINED:
        # positions alone change
        given |= {"method": "lora", "scaling": way, "query_growth": base_growth, "tape": None}
        return ExtendSettings.parse({**given, **changes}, name)
    method = way.removesuffix(WITHOUT_JUMPS)
    given["method"] = method
    adapt, own = adapt_method(method), adapt_method(chosen_method(settings))
    if not adapt.effects.lora:
        given |= LORA
    if not adapt.effects.tape:
        given["tape"] = None
    if train_defaults(adapt)["learning_rate"] != train_defaults(own)["learning_rate"]:
        given["learning_rate"] = None
    if "steps" in changes:
        given |= {"minutes": None, "tokens": None}
    if way.endswith(WITHOUT_JUMPS):
        given["jumps"] = {"rate": 0.0}
    for part in ("jumps", "tape"):
        if part in changes:
            changes[part] = {**(given.get(part) or {}), **changes[part]}
    return ExtendSettings.parse({**given, **changes}, name)


def adapt_method(name: str) -> AdaptSettings:
    """The settings of adapt of a method's name alone."""
    return AdaptSettings.parse({"method": split_method(name)[1]}, "extend")


def list_comparators(settings: ExtendSettings) -> tuple[str, ...]:
    """The names of the comparators; for "all", every one but the extension's own way."""
    names = list(settings.compare)
    if EVERY_COMPARATOR in names:
        method = chosen_method(settings)
        own = f"{method}{WITHOUT_JUMPS}" if (settings.jumps or {}).get("rate") == 0 else method
        names += [name for name in COMPARATORS if name != own or settings.scaling or settings.theta]
        names.remove(EVERY_COMPARATOR)
    return tuple(dict.fromkeys(names))
