"""Help on the fields of a recipe, made from their definitions."""

from ..settings import list_fields
from .recipe import Recipe, available_recipes


def recipe_help() -> str:
    """One paragraph per field, as the help of a command shows it."""
    lines = [f"{name}{f' = {default}' if default else ''}: {words}" for name, default, words, _ in list_fields(Recipe)]
    shipped = f"Recipes that come with equitape: {', '.join(available_recipes())}."
    return "\n\n".join([shipped, "Fields of a recipe, each with its default, to set with key=value:", *lines])
