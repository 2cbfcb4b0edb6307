"""Recipes: YAML files that define a comparison, read into dataclasses. Unknown keys are errors."""

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
    """Sizes of the decoder, named as in `EquitapeConfig`, which checks all others, since they depend on each other."""

    hidden_size: int = 256
    """Width."""
    intermediate_size: Annotated[int, Ge(1)] = 512
    """Width of the feed-forward layer."""
    num_hidden_layers: int = 6
    """Number of blocks, counted as often as they are applied."""
    num_attention_heads: int = 8
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key-value heads. Default: num_attention_heads."""
    head_dim: int | None = None
    """Width of a head. Default: hidden_size / num_attention_heads."""
    num_loops: int = 1
    """How often the stack of blocks is applied."""
    sliding_window: int | None = None
    """How many tokens back attention sees. Default: all."""
    qk_norm: bool = False
    """Normalize queries and keys."""
    query_growth: float | None = None
    """Queries are multiplied by 1 + query_growth ln(tokens read / query_growth_start). Default: they are not."""
    query_growth_start: int | None = None
    """Tokens from which queries grow. Default: the trained length."""
    attention_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout of attention weights in training."""
    tie_word_embeddings: bool = False
    """Share one table between input and output embeddings."""
    initializer_range: Annotated[float, Ge(0)] = 0.02
    """Standard deviation of the initial weights."""
    max_position_embeddings: int | None = None
    """Rows of a learned table and range of random ids. Default: the longest tested length."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """How much is evaluated."""

    share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Fraction of the task's full evaluation after training."""
    share_while_training: Annotated[float, Gt(0), Le(1)] = 0.05
    """Fraction evaluated every `train.eval_steps` steps."""


@dataclass(frozen=True, kw_only=True)
class EncodingChoice:
    """One of the encodings of a recipe."""

    label: str
    encoding: dict[str, Any]
    seeds: tuple[int, ...]
    start: str | None = None
    """Folder of a checkpoint to continue training from, with its encoding."""
    jumps: Jumps | None = None
    """Jumps in training this encoding. Default: those of `train`."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """The definition of a comparison."""

    name: str = ""
    """Name in reports. Default: the file's name."""
    description: str = ""
    """One or two sentences: the purpose, and deviations from the source it follows."""
    task: dict[str, Any] = field(default_factory=dict)
    """{name: ..., plus the task's options}; docs/reference/tasks has a page on each."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """Sizes of the decoder, the same for every encoding."""
    encodings: tuple[Any, ...] = ()
    """A list of kinds, or of {kind: ..., label: ..., seeds: [...], jumps: {...}, plus the encoding's options}, or of
    {start: FOLDER, label: ..., seeds: [...], jumps: {...}} to continue from a checkpoint with its encoding."""
    seeds: tuple[Seed, ...] = (0,)
    """Seeds of weights, data and dropout. Each encoding is trained once per seed, unless it sets its own seeds."""
    train: TrainSettings = field(default_factory=TrainSettings)
    """Budget, optimizer and bookkeeping, the same for every encoding."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """How much is evaluated."""
    claims: dict[str, Any] = field(default_factory=dict)
    """{label: {metric: number}} published elsewhere, shown next to the results and marked as claims."""
    claims_source: str | None = None
    """Source of the claims."""

    def __post_init__(self) -> None:
        if not isinstance(self.task.get("name"), str):
            raise ValueError("The recipe has no task; set task.name, for example to addition.")
        if not self.encodings:
            raise ValueError("The recipe has no encodings; set a list, for example [rope, tape].")
        check_seeds(self.seeds, "seeds")
        if self.train.seed:
            raise ValueError(f"train.seed has no effect in a recipe; set seeds=[{self.train.seed}] instead.")
        names = [file_name(choice.label) for choice in self.choices]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"Two encodings are called {twice[0]!r}; give each a unique label.")
        if all(choice.start is not None for choice in self.choices) and self.model != ModelSettings():
            raise ValueError("model sets sizes, but every encoding starts from a checkpoint; remove model.")
        for label, metrics in self.claims.items():
            if not isinstance(metrics, dict) or not all(isinstance(value, (int, float)) for value in metrics.values()):
                raise ValueError(f"claims: {label!r} must map metrics to numbers; it is {metrics!r}.")

    @property
    def choices(self) -> list[EncodingChoice]:
        """The encodings, each with its label and seeds."""
        return [self._choice(given) for given in self.encodings]

    def _choice(self, given: Any) -> EncodingChoice:
        if isinstance(given, str):
            given = {"kind": given}
        if not isinstance(given, dict) or not any(isinstance(given.get(key), str) for key in ("kind", "start")):
            raise ValueError(f"encodings: {given!r} is neither a kind nor a dictionary such as {{kind: tape}}.")
        options = {key: value for key, value in given.items() if key not in ("label", "seeds", "start", "jumps")}
        start = given.get("start")
        if start is not None and options:
            raise ValueError(
                f"encodings: {given!r} starts from a checkpoint, which has its own encoding; remove "
                f"{', '.join(options)}."
            )
        seeds = given.get("seeds", self.seeds)
        label = str(given.get("label", Path(start).name if start is not None else given.get("kind")))
        checked = check_seeds(seeds, f"seeds of {label!r}")
        jumps = self.train.jumps
        if "jumps" in given:
            jumps = parse_jumps(given["jumps"], label)
        return EncodingChoice(label=label, encoding=options, seeds=checked, start=start, jumps=jumps)

    def choose(self, label: str) -> EncodingChoice:
        """The encoding with a label."""
        choices = {choice.label: choice for choice in self.choices}
        if label not in choices:
            raise ValueError(
                f"The recipe has no encoding {label!r}.{describe_choices(label, choices)} "
                'For another one set encodings, for example "encodings=[rope,tape]".'
            )
        return choices[label]


def parse_jumps(given: Any, label: str) -> Jumps | None:
    """The jumps of one encoding."""
    if given is None or given is False:
        return None
    if not isinstance(given, dict):
        raise ValueError(
            f"jumps of {label!r}: {given!r} is not a dictionary; write for example {{rate: 0.03}}, or null for none."
        )
    return Jumps.parse(given, f"jumps of {label!r}")


def check_seeds(seeds: Any, where: str) -> tuple[int, ...]:
    """At least one seed, each once."""
    if (
        not isinstance(seeds, (list, tuple))
        or not seeds
        or not all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    ):
        raise ValueError(
            f"{where}: {seeds!r} is not a list of seeds; give whole numbers from 0 to below 2**32, for example [0, 1]."
        )
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{where}: {list(seeds)} repeats a seed; list each seed once.")
    return tuple(seeds)


def available_recipes() -> list[str]:
    """Names of the built-in recipes."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_recipe(source: str | Path, overrides: list[str] | tuple[str, ...] = (), *, small: bool = False) -> Recipe:
    """Read a recipe by name or file path, and apply overrides such as "train.steps=100".

    small: reduce it first (`small.reduce`) and call it NAME-small; overrides apply to the reduced recipe.
    """
    path = find_recipe(source)
    where = f"Recipe {path.stem!r}"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read the recipe {path}: {error}.") from None
    content = parse_yaml(text, where)
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a dictionary of settings; it is {type(content).__name__}.")
    content.setdefault("name", path.stem)
    if isinstance(content.get("train"), dict):
        content["train"] = with_notes(content["train"], where)
    if small:
        content = reduce(content) | {"name": f"{content['name']}-small"}
    if any(override.startswith(BUDGETS) for override in overrides) and isinstance(content.get("train"), dict):
        # a budget replaces the recipe's
        content["train"] = {key: value for key, value in content["train"].items() if f"train.{key}=" not in BUDGETS}
    for override in overrides:
        set_value(content, under_current_name(override))
    return parse_recipe(content, where)


def parse_recipe(content: dict[str, Any], where: str = "The recipe") -> Recipe:
    """Build a recipe from plain data. A single encoding needs no list."""
    single = content.get("encodings")
    if isinstance(single, (str, dict)):
        content = {**content, "encodings": [single]}
    return Recipe.parse(content, where)


def with_notes(train: dict[str, Any], where: str) -> dict[str, Any]:
    """Training settings under their current names; logs one note per old name."""
    for old in train.keys() & TrainSettings.aliases.keys():
        note_alias(where, f"train.{old}", f"train.{TrainSettings.aliases[old]}")
    if len(current_names(train)) < len(train):
        # raises ValueError: a setting is set twice
        TrainSettings.parse(train, where)
    return current_names(train)


def under_current_name(override: str) -> str:
    """An override such as "train.clip=1" under the setting's current name."""
    path, equals, value = override.partition("=")
    part, _, old = path.partition(".")
    if part != "train" or old not in TrainSettings.aliases:
        return override
    note_alias("Override", path, f"train.{TrainSettings.aliases[old]}")
    return f"train.{TrainSettings.aliases[old]}{equals}{value}"


def read_recipe(content: dict[str, Any], where: str) -> Recipe:
    """A recipe from the data of a run folder, possibly written by an older version."""
    if isinstance(content.get("train"), dict):
        content = {**content, "train": current_names(content["train"])}
    return parse_recipe(content, where)


def find_recipe(source: str | Path) -> Path:
    """The path of a built-in recipe by name, or the given path."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir() and len(path.parts) > 1:
        raise ValueError(f"{str(source)!r} is a folder; a recipe is a YAML file.")
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise ValueError(
            f"There is no recipe file {str(source)!r}; check the path, or give the name of a built-in recipe "
            "(equitape recipes lists them)."
        )
    shipped = SHIPPED / f"{source}.yaml"
    if not shipped.is_file():
        raise ValueError(f"There is no recipe {str(source)!r}.{describe_choices(source, available_recipes())}")
    return shipped


def spell_out(recipe: Recipe) -> Recipe:
    """The recipe with all options of its task and encodings, defaults included."""
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
    """The recipe as plain data, defaults included; `parse_recipe` reads it."""
    return plain(recipe.to_dict())


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, defaults included."""
    return yaml.safe_dump(resolved(recipe), sort_keys=False, allow_unicode=True, width=110)


def recipe_help() -> str:
    """One paragraph per field, for a command's help."""
    lines = [f"{name}{f' = {default}' if default else ''}: {words}" for name, default, words, _ in list_fields(Recipe)]
    shipped = f"Built-in recipes: {', '.join(available_recipes())}."
    return "\n\n".join([shipped, "Recipe fields with defaults; set them with key=value:", *lines])
