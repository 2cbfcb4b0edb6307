"""Rewrite the tables of recipes and their settings in docs/how-to/training.md from the code: python docs/tables.py."""

from pathlib import Path

from equitape.training.recipe import Recipe, available_recipes, list_fields, load_recipe

PAGE = Path(__file__).parent / "how-to/training.md"


def replace_table(text: str, heading: str, rows: list[str]) -> str:
    """The page with new rows below a heading."""
    before, found, rest = text.partition(heading)
    assert found, heading
    return "".join((before, heading, "\n".join(rows), rest[rest.index("\n\n") :]))


def main() -> None:
    """Rewrite both tables."""
    recipes = [f"| `{name}` | {load_recipe(name).description} |" for name in available_recipes()]
    settings = [f"| `{name}` | {default} | {words} |" for name, default, words, *_ in list_fields(Recipe)]
    text = replace_table(PAGE.read_text(), "| recipe | |\n|---|---|\n", recipes)
    PAGE.write_text(replace_table(text, "| field | default | |\n|---|---|---|\n", settings))


if __name__ == "__main__":
    main()
