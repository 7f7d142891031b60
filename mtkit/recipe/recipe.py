"""The recipe: one tree of settings for an experiment, read from YAML and from the command line.

A value comes from the command line, else the recipe file, else the run in `training.init_from`, else the preset, else
the default in the class. The docstring under a setting is its documentation, with the unit of a number.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator
from pydantic import ValidationError as PydanticError

from mtkit.errors import RecipeError, did_you_mean, shown
from mtkit.recipe.data import DataSettings
from mtkit.recipe.file import PromiseText, find_recipe, read_settings, with_variables
from mtkit.recipe.settings import (
    PRESETS,
    DecodingSettings,
    NonNegativeInt,
    PositiveInt,
    Seed,
    Settings,
    TrainingSettings,
    run_folder_of,
)
from mtkit.recipe.task import with_task
from mtkit.storage.records import as_python, explain

Layers = Annotated[int, Field(gt=0, le=10_000)]
Preset = Literal["tiny", "small", "base", "big"]
Metric = Literal["BLEU", "chrF", "TER", "exact", "token"]


class WordVectorFiles(Settings):
    """Files of word vectors that initialise embeddings: text of word2vec, GloVe or fastText (.vec or .txt, .gz too)."""

    source: Path | None = None
    """Word vectors of the source language, of the embeddings' width."""
    target: Path | None = None
    """Word vectors of the target language, of the embeddings' width."""


class ModelSettings(Settings):
    """The encoder-decoder: a Transformer, or a recurrent network with attention to the source."""

    architecture: Literal["transformer", "rnn"] = "transformer"
    """The Transformer, or the recurrent encoder-decoder of Bahdanau et al. (rnn). The rnn ignores
    feed_forward, norm, activation, positions and the heads of self-attention."""
    cell: Literal["gru", "lstm"] = "gru"
    """Recurrent unit of the rnn."""
    form: Literal["paper", "textbook"] = "paper"
    """Form of the rnn. paper: a bidirectional encoder, and a maxout layer before the output. textbook: a unidirectional
    encoder, whose last states are the decoder's initial states; the output reads the top layer."""
    d_model: PositiveInt = 128
    """Model width: length of a token vector."""
    heads: PositiveInt = 4
    """Number of attention heads. It must divide d_model."""
    feed_forward: PositiveInt = 512
    """Inner width of the feed-forward sub-layer."""
    encoder_layers: Layers = 2
    """Layers of the encoder."""
    decoder_layers: Layers = 2
    """Layers of the decoder."""
    norm: Literal["pre", "post"] = "pre"
    """Layer norm before each sub-layer and at the end of the stack (pre), or after each residual sum (post)."""
    reversible: bool = False
    """Reversible layers: the backward pass recomputes activations from two residual streams. Activation memory does not
    grow with the number of layers; computation is a third more. Requires norm pre and attentions without carry."""
    activation: Literal["relu", "gelu", "swish", "swiglu"] = "relu"
    """Activation of the feed-forward sub-layer."""
    positions: Literal["sinusoidal", "sinusoidal-halves", "sinusoidal-cat", "learned", "none"] = "sinusoidal"
    """Absolute positions of the embeddings: sines and cosines interleaved (sinusoidal), the same in two halves
    (sinusoidal-halves, as Hugging Face's Marian has them), in two halves with the frequencies of tensor2tensor
    (sinusoidal-cat), or learned. Relative positions are an option of the attention (positions=rotary)."""
    position_width: NonNegativeInt = 0
    """Concatenate positions of this width to embeddings of width d_model - position_width; 0 adds positions of width
    d_model. Concatenated positions need tie none, which is their default."""
    sentence_positions: bool = False
    """Positions count from the last break of a document, not from the beginning of its row. Transformers only."""
    tie: Literal["none", "decoder", "all"] = "all"
    """Share the output projection with the target embedding (decoder), or with both embeddings (all). If it is not set,
    models with separate vocabularies use decoder, and models with concatenated positions none."""
    embeddings: WordVectorFiles | None = None
    """Word vectors with which the embeddings begin, for one side or both. With `tie: all`, one file for both sides."""
    output_bias: bool = False
    """Add a learned bias per piece to the logits."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout probability in embeddings and at the end of each sub-layer."""
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability of attention weights."""
    activation_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability inside the feed-forward sub-layer."""
    max_length: PositiveInt = 1024
    """Maximum pieces of source and target, including the end mark."""

    @model_validator(mode="before")
    @classmethod
    def _concatenated_positions_are_not_tied(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and settings.get("position_width") and "tie" not in settings:
            return {**settings, "tie": "none"}
        return settings

    @model_validator(mode="after")
    def _positions_leave_channels_for_tokens(self) -> Self:
        width = self.position_width
        if width >= self.d_model:
            raise ValueError(f"model.position_width = {width} must be less than model.d_model = {self.d_model}")
        if width and (self.positions == "none" or self.architecture == "rnn"):
            other = "model.positions = none" if self.architecture != "rnn" else "the rnn"
            raise ValueError(f"{other} has no positions to concatenate; leave model.position_width out")
        if self.sentence_positions and (self.positions == "none" or self.architecture == "rnn"):
            other = "model.positions = none" if self.architecture != "rnn" else "the rnn"
            raise ValueError(f"{other} has no absolute positions; leave model.sentence_positions out")
        if width and self.tie != "none":
            raise ValueError(
                f"model.tie = {self.tie} needs embeddings as wide as model.d_model, and model.position_width = {width} "
                "makes them narrower; set model.tie = none"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"model.heads = {self.heads} does not divide model.d_model = {self.d_model}")
        return self

    @model_validator(mode="after")
    def _reversible_layers_are_pre_norm(self) -> Self:
        if self.reversible and self.norm != "pre":
            raise ValueError("model.reversible = true needs model.norm = pre: a norm after the sum cannot be inverted")
        return self

    @model_validator(mode="after")
    def _the_rnn_is_whole(self) -> Self:
        if self.architecture != "rnn":
            return self
        if self.reversible:
            raise ValueError("model.reversible = true needs model.architecture = transformer")
        for option in ("attention_dropout", "activation_dropout"):
            if getattr(self, option):
                raise ValueError(f"the rnn does not support model.{option}; leave it out, and set model.dropout")
        if self.form == "textbook" and self.encoder_layers != self.decoder_layers:
            raise ValueError(
                "model.form = textbook needs model.encoder_layers = model.decoder_layers: each decoder layer "
                "starts from the state of one encoder layer"
            )
        return self


AttentionNames = str | list[str] | None


class AttentionSettings(Settings):
    """Attention mechanisms per role and layer."""

    name: str | None = None
    """Mechanism in the roles of its paper. The other roles use `full`. Default: `full`, or `additive` in the rnn, which
    has only cross attention. `full:2+band:2`, here and for each role, has several mechanisms in the heads of
    a layer."""
    encoder: AttentionNames = None
    """Encoder self-attention: one name, or a list with one name per layer. Roles that the paper lacks are allowed."""
    decoder: AttentionNames = None
    """Decoder causal self-attention: one name, or a list with one name per layer."""
    cross: AttentionNames = None
    """Cross attention, from decoder to source: one name, or a list with one name per layer."""
    options: Annotated[dict[str, Any], BeforeValidator(as_python)] = Field(default_factory=dict)
    """Options of mechanisms and slots, for all roles or for one: `window_radius: 64`, `decoder.window_radius: 64`,
    `positions: rotary`, `projection: multi-query`; or for one mechanism of several: `band.window_radius: 64`."""


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


def differences(one: Any, other: Any, prefix: str = "") -> list[str]:
    """List the settings that differ between two dumped recipes, as "training.peak_rate: 0.001 -> 0.002"."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = list(one) + [key for key in other if key not in one]
        return [
            line
            for key in keys
            for line in differences(one.get(key), other.get(key), f"{prefix}.{key}" if prefix else str(key))
        ]
    return [] if one == other else [f"{prefix}: {one} -> {other}"]


def _explain(error: PydanticError) -> str:
    """Describe the first error of a recipe in one line."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        return f"unknown setting {shown('.'.join(place))}{did_you_mean(place[-1], _keys_at(place[:-1]))}"
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
    if "preset" not in nested:
        # the run's weights replace its initial embeddings
        settings["model"] = {**inherited.get("model", {}), "embeddings": None, **model}
    if all(attention.get(role) is None for role in ROLES):
        options = {**inherited.get("attention", {}).get("options", {}), **options}
        settings["attention"] = {**inherited.get("attention", {}), "options": options}
    return settings
