"""The study: what a comparison compares, and how; a YAML file, or the options of `mtkit compare`.

# Which attention learns to recall?
recipe: builtin-compare             # a recipe's name or file; `settings` override it
settings: {training: {max_updates: 1000}}
tasks: [copy, mqar]                 # built-in tasks; without them, the recipe's data
entries:
  - full
  - band[window_radius=16]
  - {name: wide, attention: linear, model: {d_model: 160}}
seeds: 3
search:
  settings: {training.peak_rate: [7.5e-4, 1.5e-3, 3e-3]}
  share: 0.5
match: parameters
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic import ValidationError as PydanticError

from mtkit.errors import MtkitError, RecipeError, did_you_mean, shown
from mtkit.experiments.entries import Entry, nested, parse_entries, setting_place, with_common_options
from mtkit.model.build import label_attention
from mtkit.recipe import Recipe, make_recipe, merged, recipe_settings
from mtkit.recipe.file import STUDIES, find_recipe, read_settings, with_variables
from mtkit.recipe.recipe import with_inherited
from mtkit.recipe.settings import LIMITS, PositiveInt, Seed, Settings
from mtkit.storage.records import explain

Match = Literal["parameters", "flops"]


class Range(Settings):
    """A range of numbers, for random and Bayesian search."""

    low: int | float
    """Smallest value."""
    high: int | float
    """Largest value. Settings that take whole numbers are whole."""
    log: bool = True
    """Draw the logarithm uniformly, rather than the number."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(
                f"low = {shown(self.low)} must be below high = {shown(self.high)}, and above 0 if log is true"
            )
        return self


def _places(settings: Any) -> Any:
    """Return the settings with their full names."""
    if not isinstance(settings, Mapping):
        return settings
    places: dict[str, Any] = {}
    for key, value in settings.items():
        place = setting_place(str(key))
        if place in places:
            raise ValueError(f"search.settings has {place} twice; keep one of them")
        places[place] = value
    return places


Values = Annotated[
    Annotated[tuple[Any, ...], Field(min_length=1), Tag("list")] | Annotated[Range, Tag("range")],
    Discriminator(lambda values: "range" if isinstance(values, Mapping | Range) else "list"),
]


class SearchSettings(Settings):
    """Search of settings: the same number of trials for each entry, with the first seed."""

    settings: Annotated[dict[str, Values], BeforeValidator(_places), Field(min_length=1)]
    """Values to try for each setting: {training.peak_rate: [1.5e-3, 3e-3]}, or a range: {low: 1e-4, high: 1e-2}."""
    method: Literal["grid", "random", "bayesian"] = "grid"
    """All combinations (grid), or `trials` combinations chosen by Optuna: at random, or by the results so far."""
    trials: PositiveInt | None = None
    """Trials per entry of random and Bayesian search."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the budget that a trial of the search has. The entry's other seeds have the whole budget."""
    pruner: Literal["none", "median", "halving"] = "none"
    """Rule of Optuna that stops a trial of the search early: below the median of the entry's trials at the same
    validation, or by successive halving."""

    @model_validator(mode="after")
    def _values_differ(self) -> Self:
        for key, values in self.settings.items():
            if not isinstance(values, Range) and any(value in values[:place] for place, value in enumerate(values)):
                raise ValueError(f"{key} has a value twice; keep one of them")
        return self

    @model_validator(mode="after")
    def _grids_are_finite(self) -> Self:
        if self.method == "grid":
            if ranges := [key for key, values in self.settings.items() if isinstance(values, Range)]:
                raise ValueError(f"the range of {ranges[0]} needs method = random or bayesian; a grid needs a list")
            if self.trials is not None:
                raise ValueError("trials needs method = random or bayesian; a grid tries every combination")
        elif self.trials is None:
            raise ValueError(f"method = {self.method} needs trials: their number for each entry")
        return self

    def examples(self) -> list[dict[str, Any]]:
        """Return points to check before the search: all of a grid, or each value and both ends of each range."""
        if self.method == "grid":
            return self.grid()
        return [
            {key: value}
            for key, values in self.settings.items()
            for value in ((values.low, values.high) if isinstance(values, Range) else values)
        ]

    def grid(self) -> list[dict[str, Any]]:
        """Return all combinations of listed values, each as {"training.peak_rate": 0.003}."""
        lists = {key: values for key, values in self.settings.items() if not isinstance(values, Range)}
        return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def _seeds(value: Any) -> Any:
    """Return the seeds 1 to N for a number N."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= 1000:
            raise ValueError("give a number of seeds from 1 to 1000, or a list of seeds")
        return tuple(range(1, value + 1))
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | Mapping) else value


Seeds = Annotated[
    tuple[Seed, ...], BeforeValidator(_seeds, json_schema_input_type=int | tuple[int, ...]), Field(min_length=1)
]


class StudySettings(Settings):
    """A study, as its YAML file has it."""

    recipe: str | None = None
    """Recipe that all entries share: a name from `mtkit recipes`, or a YAML file."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings that override the recipe's, nested as there."""
    tasks: Annotated[tuple[str | dict[str, Any], ...], BeforeValidator(_listed)] = ()
    """Built-in tasks, by name or as settings of `data.task` in a recipe: every entry is trained on each. A `label`
    among the settings is the task's name in tables."""
    entries: Annotated[tuple[str | dict[str, Any], ...], BeforeValidator(_listed)] = ()
    """Entries: texts such as `band[window_radius=16]`, or settings over the recipe, with a `name`."""
    seeds: Seeds = (1,)
    """Number of seeds, or a list of seeds."""
    search: SearchSettings | None = None
    match: Match | None = None
    """Set the feed-forward width of every entry so that it has as many parameters as the first entry, or as many
    training FLOPs per token, within 1%."""
    sides: tuple[str, ...] = ()
    """Test sides to translate. Default: the first one, or all of a task."""
    columns: tuple[str, ...] = ()
    """Columns of the table, in order. Default: the metrics that the data requires."""

    @model_validator(mode="after")
    def _seeds_differ(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds has a seed twice; keep one of them")
        return self


@dataclass(frozen=True)
class Study:
    """A study with its entries parsed."""

    base: Mapping[str, Any]
    """Nested settings that all entries share, as they are written: no preset or default is filled in."""
    entries: tuple[Entry, ...]
    """The first one is the baseline of the tests."""
    settings: StudySettings

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds; the first is the seed of the search."""
        return self.settings.seeds

    def recipe(self, entry: Entry) -> Recipe:
        """Return the complete recipe of an entry. Raises: RecipeError for an invalid setting."""
        return trial_recipe(merged(self.base, entry.settings), f"the entry {entry.name}")


def trial_recipe(settings: Mapping[str, Any], origin: str) -> Recipe:
    """Return the complete recipe of nested settings, in which data paths may have environment variables.

    Raises: RecipeError that starts with `origin`.
    """
    return make_recipe(with_inherited(with_variables(settings, Path(origin))), origin)


def read_study(path: Path) -> tuple[dict[str, Any], str]:
    """Read the settings of a study, a YAML file or one that comes with mtkit, without any check; also return its path.

    Raises: RecipeError if it cannot be read, or no study has this name.
    """
    study_path = find_recipe(path, STUDIES)
    return read_settings(study_path, "study"), str(study_path)


def make_study(
    settings: Mapping[str, Any], *, options: Mapping[str, Any] | None = None, origin: str | None = None
) -> Study:
    """Make a study from settings as in its file.

    Attention `options` go to every entry that has them; so do the options of the recipe. Of the recipe's attention,
    nothing else is used.

    Raises: MtkitError for an unknown setting or an invalid value.
    """
    where = f"{origin}: " if origin else ""
    chosen = _checked(settings, where)
    base = recipe_settings(None if chosen.recipe is None else Path(chosen.recipe), chosen.settings)
    attention = base.pop("attention", None) or {}
    written = (attention.get("options") or {}) if isinstance(attention, Mapping) else {}
    if not isinstance(written, Mapping):
        raise RecipeError(f"{where}attention.options = {shown(written)}: should be a mapping")
    common = {**written, **(options or {})}
    training = base.get("training")
    if isinstance(training, Mapping) and "max_updates" not in training and any(training.get(name) for name in LIMITS):
        base["training"] = {**training, "max_updates": None}  # a written limit replaces the preset's
    base.pop("promises", None)
    seed = base.pop("seed", None)
    if "seeds" not in chosen.model_fields_set and seed is not None:
        chosen = _checked({**settings, "seeds": [seed]}, where)
    if chosen.match is not None and chosen.search is not None:
        for place in chosen.search.settings:
            if not place.startswith(("training.", "decoding.")) and "dropout" not in place:
                raise RecipeError(
                    f"{where}match sets the sizes of the models, so leave {place} out of the search, or match"
                )
    entries = with_common_options(parse_entries(chosen.entries), base, common, options or ())
    study = Study(base, tuple(entries), chosen)
    for entry in entries:
        label_attention(study.recipe(entry))  # raises for attentions that cannot be built
    for point in chosen.search.examples() if chosen.search else ():
        trial_recipe(with_point(base, point), "the search")
        for entry in entries:
            where = f"the search: the entry {entry.name}"
            try:
                label_attention(trial_recipe(with_point(merged(base, entry.settings), point), where))
            except RecipeError:
                raise
            except MtkitError as error:  # of the attention, which has no place
                raise MtkitError(f"{where}: {error}") from error
    return study


def _checked(settings: Mapping[str, Any], where: str) -> StudySettings:
    """Return the checked settings of a study. Raises: RecipeError that starts with `where`."""
    try:
        return StudySettings.model_validate(settings)
    except PydanticError as error:
        fault = error.errors()[0]
        if fault["type"] == "extra_forbidden":
            *parts, key = map(str, fault["loc"])
            known = SearchSettings if parts == ["search"] else Range if parts[:1] == ["search"] else StudySettings
            names = list(known.model_fields)
            hint = did_you_mean(key, names) or f"; there are: {', '.join(names)}"
            raise RecipeError(f"{where}unknown setting {shown('.'.join([*parts, key]))} of a study{hint}") from error
        raise RecipeError(f"{where}{explain(error)}") from error


def with_point(settings: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with the point's: {"training.peak_rate": 0.003}."""
    result = dict(settings)
    for place, value in point.items():
        result = merged(result, nested(place, value))
    return result


def at_share(training: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return the limits of training settings at a share of the budget; counts are at least 1."""
    limits = {name: training[name] * share for name in LIMITS if training.get(name)}
    return {
        name: value if name in ("max_minutes", "max_flops") else max(round(value), 1) for name, value in limits.items()
    }


def check_limits(study: Study) -> None:
    """Raise MtkitError for a training without a limit."""
    for entry in study.entries:
        training = study.recipe(entry).training
        if not training.limits and not training.patience:
            raise MtkitError(f"the training of {entry.name} has no limit; give --max-updates or --max-minutes")
