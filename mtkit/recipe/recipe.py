"""The recipe: one tree of settings for an experiment, read from YAML and from the command line.

A value comes from the command line, else the recipe file, else the run in `training.init_from`, else the preset, else
the default in the class. The docstring under a setting is its documentation, with the unit of a number.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic import ValidationError as PydanticError

from mtkit.errors import RecipeError, did_you_mean, shown
from mtkit.recipe.data import DataSettings
from mtkit.recipe.file import PromiseText, find_recipe, read_settings, with_variables
from mtkit.recipe.model import AttentionSettings, ModelSettings
from mtkit.recipe.settings import PRESETS, DecodingSettings, Seed, Settings, TrainingSettings, run_folder_of
from mtkit.recipe.task import with_task
from mtkit.storage.records import explain

Preset = Literal["tiny", "small", "base", "big"]
Metric = Literal["BLEU", "chrF", "TER", "exact", "token"]


class ScoringSettings(Settings):
    """Scores, in validation and in `score`."""

    tokenize: str | None = None
    """sacrebleu tokenizer of BLEU. Default by target language: zh, ja-mecab and ko-mecab if installed, char for
    Thai, Lao, Khmer and Burmese, else 13a."""
    lowercase: bool = False
    """Ignore case in BLEU, chrF, exact and token match."""
    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] = ("BLEU", "chrF", "TER")
    """Metrics of `score`. `exact` is the percentage of segments that equal the reference, `token` the percentage of
    positions with the right word. Default of tasks: exact and token. Validation uses `training.best_by`."""


class Recipe(Settings):
    """All settings of an experiment. All commands read the same recipe."""

    preset: Preset = "tiny"
    """Model size with matching training settings."""
    seed: Seed = 1
    """Random seed of initialisation, dropout, data order and mechanisms."""
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    attention: AttentionSettings = AttentionSettings()
    training: TrainingSettings = TrainingSettings()
    decoding: DecodingSettings = DecodingSettings()
    scoring: ScoringSettings = ScoringSettings()
    promises: tuple[PromiseText, ...] = ()
    """Bounds on scores for `mtkit recipes check`, in order of minutes: "BLEU >= 37 on test after 20 minutes"."""

    def tied(self, *, joint: bool) -> Self:
        """Return the recipe, with `model.tie: decoder` if `tie` is not set and the data has two vocabularies."""
        if joint or "tie" in self.model.model_fields_set:
            return self
        return self.model_copy(update={"model": self.model.model_copy(update={"tie": "decoder"})})

    def for_task(self) -> Self:
        """Return the recipe, with the measures of built-in tasks as far as it sets none; unchanged without a task."""
        if self.data.task is None:
            return self
        update: dict[str, Settings] = {}
        if "metrics" not in self.scoring.model_fields_set:
            update["scoring"] = self.scoring.model_copy(update={"metrics": ("exact", "token")})
        if "best_by" not in self.training.model_fields_set:
            update["training"] = self.training.model_copy(update={"best_by": "exact"})
        return self.model_copy(update=update)

    def with_decoding(self, settings: Mapping[str, Any]) -> "Recipe":
        """Return the recipe with these decoding settings over its own. Raises: RecipeError for an invalid setting."""
        return make_recipe(merged(self.model_dump(), {"decoding": settings}))

    @model_validator(mode="after")
    def _r_drop_has_dropout(self) -> Self:
        model, alpha = self.model, self.training.r_drop
        if alpha and not (model.dropout or model.attention_dropout or model.activation_dropout):
            raise ValueError(
                f"training.r_drop = {alpha:g} needs dropout: without it both passes are the same; "
                "set model.dropout = 0.1, or training.r_drop = 0"
            )
        return self

    @model_validator(mode="after")
    def _split_layers_run_as_layers(self) -> Self:
        if self.training.shard and self.model.reversible:
            raise ValueError("training.shard does not support model.reversible; set one of the two to false")
        return self

    @model_validator(mode="after")
    def _layers_are_checkpointed_once(self) -> Self:
        if self.training.checkpoint_activations and self.model.architecture == "rnn":
            raise ValueError("training.checkpoint_activations needs model.architecture = transformer")
        if self.training.checkpoint_activations and self.model.reversible:
            raise ValueError("model.reversible keeps no activations; leave training.checkpoint_activations out")
        return self


ROLES = ("name", "encoder", "decoder", "cross")


def load_recipe(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None, begun: Path | None = None
) -> Recipe:
    """Load the recipe from a YAML file (all defaults if None); nested `overrides` replace its settings.

    `path` may be the name of a recipe that comes with mtkit. Environment variables in its paths are expanded. Relative
    paths start at the current folder, as on the command line. With `training.init_from`, the default model and
    attention come from that run, or from the run in the folder `begun` if a training resumes there.

    Raises: RecipeError with the file, the setting, the value and the rule.
    """
    if path is None:
        return make_recipe(with_inherited(overrides or {}, begun))
    path = find_recipe(path)
    settings = overridden(with_variables(read_settings(path), path), overrides or {}, origin=str(path))
    return make_recipe(with_inherited(settings, begun), origin=str(path))


def recipe_settings(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the nested settings of a recipe file (none if None) under `overrides`, as they are written.

    No preset, default or value of an environment variable is filled in.

    Raises: RecipeError as `load_recipe`.
    """
    if path is None:
        return dict(overrides or {})
    path = find_recipe(path)
    return overridden(read_settings(path), overrides or {}, origin=str(path))


def make_recipe(settings: Mapping[str, Any], origin: str | None = None) -> Recipe:
    """Make the recipe from nested settings over their preset. Raises: RecipeError that starts with `origin`."""
    preset, where = settings.get("preset", "tiny"), f"{origin}: " if origin else ""
    if preset not in get_args(Preset):
        names = list(get_args(Preset))
        hint = did_you_mean(str(preset), names)
        raise RecipeError(f"{where}no preset {shown(preset)}{hint}; the presets are {', '.join(names)}")
    try:
        return Recipe.model_validate(merged(PRESETS[preset], settings)).for_task()
    except PydanticError as error:
        raise RecipeError(where + _explain(error)) from error


def over_preset(preset: str, path: Path) -> list[str]:
    """List the preset's settings that a recipe file changes, as "model.d_model: 512 -> 256"."""
    below, settings = PRESETS[preset], read_settings(find_recipe(path))
    above = {
        name: {key: value for key, value in (settings.get(name) or {}).items() if key in below[name]} for name in below
    }
    return differences(below, merged(below, above))


def overridden(settings: Mapping[str, Any], above: Mapping[str, Any], origin: str | None = None) -> dict[str, Any]:
    """Return a user's settings, overridden by the settings `above`.

    If `above` names an attention that the settings do not name, their attention options are left out.

    Raises: RecipeError that starts with `origin`, if `above` would replace an invalid value with a mapping.
    """
    settings, above = with_task(settings), with_task(above)
    if _replaces(settings, above):
        make_recipe(settings, origin)
    attention, chosen = settings.get("attention"), above.get("attention")
    if isinstance(attention, Mapping) and isinstance(chosen, Mapping):
        named = [attention[role] for role in ROLES if attention.get(role) is not None]
        if named and chosen.get("name") not in (None, *named):
            settings = {**settings, "attention": {key: value for key, value in attention.items() if key != "options"}}
    return merged(settings, above)


def _replaces(settings: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    """Return whether a mapping in `above` replaces a value of another type in `settings`."""
    pairs = [(settings.get(key), value) for key, value in above.items() if isinstance(value, Mapping)]
    return any(_replaces(under, value) if isinstance(under, Mapping) else under is not None for under, value in pairs)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; `above` overrides `below`."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        result[key] = merged(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return result


UNSET = type("Unset", (), {"__str__": lambda _: "unset"})()
"""A setting that is not there, unlike one that is null."""


def differences(one: Any, other: Any, prefix: str = "") -> list[str]:
    """List the settings that differ between two dumped recipes, as "training.peak_rate: 0.001 -> 0.002"."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = list(one) + [key for key in other if key not in one]
        return [
            line
            for key in keys
            for line in differences(
                one.get(key, UNSET), other.get(key, UNSET), f"{prefix}.{key}" if prefix else str(key)
            )
        ]
    return [] if one == other else [f"{prefix}: {one} -> {other}"]


def _explain(error: PydanticError) -> str:
    """Describe the first error of a recipe in one line."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"]]
    if fault["type"] in ("extra_forbidden", "invalid_key"):  # the second is a number in place of a name
        hint = did_you_mean(place[-1], _keys_at(place[:-1])) or _elsewhere(place[-1])
        return f"unknown setting {shown('.'.join(place))}{hint}"
    return explain(error)


def _keys_at(place: list[str]) -> list[str]:
    group: Any = Recipe
    for part in place:
        if part not in group.model_fields:
            continue  # an index of a list, or a key of a mapping
        group = next(_groups(group.model_fields[part].annotation), None)
        if group is None:
            return []
    return list(group.model_fields)


def _elsewhere(key: str) -> str:
    """Return `" (did you mean 'data.tokenizer.vocabulary'?)"` if one other place of a recipe has a setting `key`."""

    def places(group: Any, above: str) -> Iterator[str]:
        for name, field in group.model_fields.items():
            if name == key:
                yield above + name
            for inner in _groups(field.annotation):
                yield from places(inner, f"{above}{name}.")

    first, *others = [*dict.fromkeys(places(Recipe, ""))] or [""]
    return f" (did you mean '{first}'?)" if first and not others else ""


def _groups(annotation: Any) -> Iterator[Any]:
    """Yield the settings classes in a type annotation."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for argument in get_args(annotation):
        yield from _groups(argument)


def with_inherited(nested: Mapping[str, Any], begun: Path | None = None) -> dict[str, Any]:
    """Add the settings that nested settings inherit from the run in `training.init_from`.

    A run that resumes in the folder `begun` reads them from its own recipe.yaml and does not need the other run.
    The model is inherited unless a preset is set, because otherwise the weights would not fit. The attention is
    inherited if no mechanism is set. If there is no such run, the settings do not change.
    """
    settings, training = dict(nested), nested.get("training")
    run_name = training.get("init_from") if isinstance(training, Mapping) else None
    path = (begun or run_folder_of(Path(str(run_name)))) / "recipe.yaml"
    if run_name is None or not path.is_file():
        return settings  # the caller raises when it opens the run
    model, attention = nested.get("model") or {}, nested.get("attention") or {}
    options: Any = attention.get("options", {}) if isinstance(attention, Mapping) else None
    if not all(isinstance(section, Mapping) for section in (model, attention, options)):
        return settings  # make_recipe raises
    inherited = read_settings(path)
    for section in ("model", "attention"):
        if not isinstance(inherited.get(section, {}), Mapping):
            raise RecipeError(f"{path} is damaged: {section} = {shown(inherited[section])} should be a mapping")
    if not isinstance(options_of_run := inherited.get("attention", {}).get("options", {}), Mapping):
        raise RecipeError(f"{path} is damaged: attention.options = {shown(options_of_run)} should be a mapping")
    if "preset" not in nested:
        # the run's weights replace its initial embeddings
        settings["model"] = {**inherited.get("model", {}), "embeddings": None, **model}
    if all(attention.get(role) is None for role in ROLES):
        options = {**inherited.get("attention", {}).get("options", {}), **options}
        settings["attention"] = {**inherited.get("attention", {}), "options": options}
    return settings
