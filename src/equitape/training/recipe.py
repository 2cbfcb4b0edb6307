"""Recipes: a YAML file that says everything about a comparison, read into dataclasses; unknown keys are refused."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import yaml

from ..registry import describe_choices
from ..runs.files import plain
from ..runs.folders import file_name
from ..settings import Ge, Gt, Le, Lt, Settings, list_fields, note_alias
from ..values import parse_yaml, set_value
from .settings import Jumps, Seed, TrainSettings, current_names
from .small import reduce

SHIPPED = Path(__file__).parent.parent / "recipes"
BUDGETS = ("train.steps=", "train.tokens=", "train.minutes=")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Sizes of the decoder, under the names `EquitapeConfig` has for them.

    `EquitapeConfig` checks all other sizes, since it knows how they depend on each other.
    """

    hidden_size: int = 256
    """Width."""
    intermediate_size: Annotated[int, Ge(1)] = 512
    """Width of the feed-forward part."""
    num_hidden_layers: int = 6
    """Blocks, counted as often as they are applied."""
    num_attention_heads: int = 8
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key-value heads; as many as query heads when left out."""
    head_dim: int | None = None
    """Width of a head; hidden_size / num_attention_heads when left out."""
    num_loops: int = 1
    """How often the stack of blocks is applied."""
    sliding_window: int | None = None
    """How far back attention sees; everything when left out."""
    qk_norm: bool = False
    """Norms on queries and keys."""
    attention_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout of attention weights while training."""
    tie_word_embeddings: bool = False
    """Whether input and output share one table of embeddings."""
    initializer_range: Annotated[float, Ge(0)] = 0.02
    """Spread of the weights at the start."""
    max_position_embeddings: int | None = None
    """Rows of a learned table and range of random ids; the longest tested length when left out."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """How much is evaluated."""

    share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the task's full evaluation that is done after training."""
    share_while_training: Annotated[float, Gt(0), Le(1)] = 0.05
    """Share that is done every `train.eval_steps` steps."""


@dataclass(frozen=True, kw_only=True)
class EncodingChoice:
    """One of the encodings of a recipe."""

    label: str
    encoding: dict[str, Any]
    seeds: tuple[int, ...]
    start: str | None = None
    """Folder of the checkpoint that training goes on from; its encoding is its own."""
    jumps: Jumps | None = None
    """Jumps of this encoding's training; those of `train` if it names none."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """Everything about a comparison."""

    name: str = ""
    """What reports call it; the file's name when left out."""
    description: str = ""
    """One or two sentences: what it is for, and where it departs from what it follows."""
    task: dict[str, Any] = field(default_factory=dict)
    """{name: ..., and the task's own options}; docs/reference/tasks has a page on each."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """Sizes of the decoder, the same for every encoding."""
    encodings: tuple[Any, ...] = ()
    """A list of kinds, or of {kind: ..., label: ..., seeds: [...], jumps: {...}, and the encoding's own options}; or of
    {start: FOLDER, label: ..., seeds: [...], jumps: {...}} to go on from checkpoints, which bring their encoding."""
    seeds: tuple[Seed, ...] = (0,)
    """Seeds of weights, data and dropout; each encoding is trained once with each, unless it names its own."""
    train: TrainSettings = field(default_factory=TrainSettings)
    """Budget, optimizer and bookkeeping, the same for every encoding."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """How much is evaluated."""
    claims: dict[str, Any] = field(default_factory=dict)
    """{label: {metric: number}} that others published, shown beside ours and marked as claims."""
    claims_source: str | None = None
    """Who claims them."""

    def __post_init__(self) -> None:
        if not isinstance(self.task.get("name"), str):
            raise ValueError("The recipe names no task; give task.name, for example addition.")
        if not self.encodings:
            raise ValueError("The recipe has no encodings; give a list, for example [rope, tape].")
        check_seeds(self.seeds, "seeds")
        if self.train.seed:
            raise ValueError(f"train.seed plays no part in a recipe; give seeds, as seeds=[{self.train.seed}].")
        names = [file_name(choice.label) for choice in self.choices]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"More than one encoding is called {twice[0]!r}; give each a label of its own.")
        if all(choice.start is not None for choice in self.choices) and self.model != ModelSettings():
            raise ValueError("model gives sizes, but every encoding starts from a checkpoint, which has its own.")
        for label, metrics in self.claims.items():
            if not isinstance(metrics, dict) or not all(isinstance(value, (int, float)) for value in metrics.values()):
                raise ValueError(f"claims: {label!r} must hold metrics and their numbers; it is {metrics!r}.")

    @property
    def choices(self) -> list[EncodingChoice]:
        """The encodings, each with its label and seeds."""
        return [self._choice(given) for given in self.encodings]

    def _choice(self, given: Any) -> EncodingChoice:
        if isinstance(given, str):
            given = {"kind": given}
        if not isinstance(given, dict) or not any(isinstance(given.get(key), str) for key in ("kind", "start")):
            raise ValueError(f"encodings: {given!r} is neither a kind nor a dictionary with one, as {{kind: tape}}.")
        options = {key: value for key, value in given.items() if key not in ("label", "seeds", "start", "jumps")}
        start = given.get("start")
        if start is not None and options:
            raise ValueError(
                f"encodings: {given!r} starts from a checkpoint, which brings its encoding; leave out "
                f"{', '.join(options)}."
            )
        seeds = given.get("seeds", self.seeds)
        label = str(given.get("label", Path(start).name if start is not None else given.get("kind")))
        checked = check_seeds(seeds, f"seeds of {label!r}")
        jumps = self.train.jumps
        if "jumps" in given:
            jumps = Jumps.parse(given["jumps"], f"jumps of {label!r}") if given["jumps"] else None
        return EncodingChoice(label=label, encoding=options, seeds=checked, start=start, jumps=jumps)

    def choose(self, label: str) -> EncodingChoice:
        """The encoding of a label."""
        choices = {choice.label: choice for choice in self.choices}
        if label not in choices:
            raise ValueError(f"The recipe has no encoding {label!r}.{describe_choices(label, choices)}")
        return choices[label]


def check_seeds(seeds: Any, where: str) -> tuple[int, ...]:
    """At least one, each once."""
    if (
        not isinstance(seeds, (list, tuple))
        or not seeds
        or not all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    ):
        raise ValueError(
            f"{where}: {seeds!r} is not a list of seeds; give whole numbers from 0 to below 2**32, for example [0, 1]."
        )
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{where}: {list(seeds)} names a seed twice, which would only repeat a run.")
    return tuple(seeds)


def available_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_recipe(source: str | Path, overrides: list[str] | tuple[str, ...] = (), *, small: bool = False) -> Recipe:
    """Read a recipe by its name or the path of its file, and apply overrides such as "train.steps=100".

    small: reduce it first (`small.reduce`); overrides then change the reduced recipe, which is called NAME-small.
    """
    path = find_recipe(source)
    where = f"Recipe {path.stem!r}"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The recipe {path} cannot be read: {error}.") from None
    content = parse_yaml(text, where)
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a dictionary of settings; it is {type(content).__name__}.")
    content.setdefault("name", path.stem)
    if isinstance(content.get("train"), dict):
        content["train"] = with_notes(content["train"], where)
    if small:
        content = reduce(content) | {"name": f"{content['name']}-small"}
    if any(override.startswith(BUDGETS) for override in overrides) and isinstance(content.get("train"), dict):
        # a budget takes the place of the recipe's own
        content["train"] = {key: value for key, value in content["train"].items() if f"train.{key}=" not in BUDGETS}
    for override in overrides:
        set_value(content, under_current_name(override))
    return parse_recipe(content, where)


def parse_recipe(content: dict[str, Any], where: str = "The recipe") -> Recipe:
    """A recipe from plain data."""
    return Recipe.parse(content, where)


def with_notes(train: dict[str, Any], where: str) -> dict[str, Any]:
    """Training settings under the current names; one note per old name."""
    for old in train.keys() & TrainSettings.aliases.keys():
        note_alias(where, f"train.{old}", f"train.{TrainSettings.aliases[old]}")
    if len(current_names(train)) < len(train):
        # refused with the name that is given twice
        TrainSettings.parse(train, where)
    return current_names(train)


def under_current_name(override: str) -> str:
    """An override such as "train.clip=1" with the name that its setting has now."""
    path, equals, value = override.partition("=")
    part, _, old = path.partition(".")
    if part != "train" or old not in TrainSettings.aliases:
        return override
    note_alias("Override", path, f"train.{TrainSettings.aliases[old]}")
    return f"train.{TrainSettings.aliases[old]}{equals}{value}"


def read_recipe(content: dict[str, Any], where: str) -> Recipe:
    """A recipe from the plain data of a run folder, which an earlier version may have written."""
    if isinstance(content.get("train"), dict):
        content = {**content, "train": current_names(content["train"])}
    return parse_recipe(content, where)


def find_recipe(source: str | Path) -> Path:
    """The file of a shipped recipe by name, or the file itself."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir() and len(path.parts) > 1:
        raise ValueError(f"{str(source)!r} is a folder; a recipe is a YAML file.")
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise ValueError(f"There is no recipe file {str(source)!r}.")
    shipped = SHIPPED / f"{source}.yaml"
    if not shipped.is_file():
        raise ValueError(f"There is no recipe {str(source)!r}.{describe_choices(source, available_recipes())}")
    return shipped


def spell_out(recipe: Recipe) -> Recipe:
    """The same recipe with every option of its task and of its encodings, defaults included."""
    from ..encodings import ENCODINGS
    from ..tasks import TASKS

    def spelled(given: Any) -> Any:
        given = {"kind": given} if isinstance(given, str) else given
        if "kind" not in given:
            return given
        own = {key: value for key, value in given.items() if key in ("kind", "label", "seeds", "jumps")}
        options = {key: value for key, value in given.items() if key not in own}
        if own.get("jumps"):
            own["jumps"] = Jumps.parse(own["jumps"], "jumps").to_dict()
        cls = ENCODINGS[given["kind"]]
        return own | cls.options_class.parse(options, f"Encoding {cls.kind!r}").to_dict()

    name = recipe.task["name"]
    options = {key: value for key, value in recipe.task.items() if key != "name"}
    task = TASKS[name].options_class.parse(options, f"Task {name!r}").to_dict()
    return replace(recipe, task={"name": name, **task}, encodings=tuple(map(spelled, recipe.encodings)))


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe as plain data, its own defaults spelled out; `parse_recipe` reads it back."""
    return plain(recipe.to_dict())


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as a file that repeats it."""
    return yaml.safe_dump(resolved(recipe), sort_keys=False, allow_unicode=True, width=110)


def recipe_help() -> str:
    """One paragraph per field, as the help of a command shows it."""
    lines = [f"{name}{f' = {default}' if default else ''}: {words}" for name, default, words, _ in list_fields(Recipe)]
    shipped = f"Recipes that come with equitape: {', '.join(available_recipes())}."
    return "\n\n".join([shipped, "Fields of a recipe, each with its default, to set with key=value:", *lines])
