"""The recipe: one tree of settings for an experiment, read from YAML and from the command line.

A value comes from the command line, else the recipe file, else the preset, else the default written here. The sentence
under a setting is its documentation; numbers say their unit.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic import ValidationError as PydanticError

from mtkit.errors import RecipeError, did_you_mean
from mtkit.recipe.data import DataSettings
from mtkit.recipe.file import find_recipe, read_settings, with_variables
from mtkit.recipe.presets import PRESETS
from mtkit.recipe.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, Settings
from mtkit.stored import explain

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Hypotheses = Annotated[int, Field(gt=0, le=1_000)]
Preset = Literal["tiny", "small", "base", "big"]
Metric = Literal["BLEU", "chrF", "TER", "exact"]


class ModelSettings(Settings):
    """The encoder-decoder Transformer."""

    d_model: PositiveInt = 128
    """Width of a token's vector."""
    heads: PositiveInt = 4
    """Attention heads; must divide d_model."""
    feed_forward: PositiveInt = 512
    """Width inside the feed-forward sub-layer."""
    encoder_layers: PositiveInt = 2
    decoder_layers: PositiveInt = 2
    norm: Literal["pre", "post"] = "pre"
    """Layer norm before each sub-layer (and once at the end of the stack), or after each residual sum."""
    reversible: bool = False
    """Two residual streams, of which the backward pass recomputes one from the other: activation memory that does not
    grow with the number of layers, for a third more computing; with norm pre, and attentions that carry nothing."""
    activation: Literal["relu", "gelu", "swiglu"] = "relu"
    positions: Literal["sinusoidal", "sinusoidal-cat", "learned", "none"] = "sinusoidal"
    """Absolute positions added to the embeddings: sines and cosines interleaved, or in two halves side by side, or
    learned; relative ones are an option of the attention (positions=rotary)."""
    tie: Literal["none", "decoder", "all"] = "all"
    """Share the output projection with the target embedding (decoder), and with the source embedding too (all)."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of values dropped in embeddings and at the end of each sub-layer."""
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of attention weights dropped."""
    activation_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of values dropped inside the feed-forward sub-layer."""
    max_length: PositiveInt = 1024
    """Pieces that source and target may have at most, the end mark included."""

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.d_model % self.heads:
            raise ValueError(f"model.heads = {self.heads} does not divide model.d_model = {self.d_model}")
        return self

    @model_validator(mode="after")
    def _reversible_layers_are_pre_norm(self) -> Self:
        if self.reversible and self.norm != "pre":
            raise ValueError("model.reversible = true needs model.norm = pre: a norm behind the sum cannot be undone")
        return self


AttentionNames = str | list[str] | None


class AttentionSettings(Settings):
    """Which attention mechanism plays which role."""

    name: str = "full"
    """Fills the roles that its paper gives it; the others stay `full`."""
    encoder: AttentionNames = None
    """The encoder's self-attention, extensions included: one name, or a list with one for each layer."""
    decoder: AttentionNames = None
    """The decoder's causal self-attention, likewise."""
    cross: AttentionNames = None
    """The decoder's attention to the encoded source, likewise."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the mechanisms and the slots around them: `window_radius: 64`, for one role
    `decoder.window_radius: 64`, `positions: rotary`, `projection: multi-query`."""


class TrainingSettings(Settings):
    """The training loop."""

    batch_tokens: PositiveInt = 2_048
    """Padded target pieces a batch, at most (source pieces where there are more of them); where pieces are drawn anew
    each epoch, as many rows as hold so many before the draw."""
    accumulate: PositiveInt = 1
    """Batches whose gradients one update sums, each token weighing the same."""
    max_updates: PositiveInt | None = None
    """Updates after which training stops."""
    max_epochs: PositiveInt | None = None
    """Passes over the data after which training stops."""
    max_minutes: PositiveFloat | None = None
    """Minutes of training, those before a resume included, after which training stops."""
    patience: PositiveInt | None = None
    """Validations without a better BLEU after which training stops."""
    peak_rate: PositiveFloat = 1.5e-3
    """The highest learning rate."""
    schedule: Literal["noam", "inverse-sqrt", "cosine"] = "inverse-sqrt"
    """How the rate falls after the warm-up; noam sets the peak itself, 1/sqrt(d_model * warmup_updates) times
    `peak_rate`."""
    warmup_updates: NonNegativeInt = 400
    """Updates over which the rate rises from 0 to its peak."""
    cooldown: float = Field(default=0.0, ge=0.0, le=1.0)
    """The last share of training over which the rate falls linearly to 0; needs a limit in updates, epochs or time."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Adam's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-9
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decay of matrices; vectors and scalars are not decayed."""
    clip_norm: NonNegativeFloat = 1.0
    """Gradient norm that is clipped to; 0 switches clipping off."""
    label_smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Probability mass spread evenly over the whole vocabulary."""
    subword_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """BPE dropout: probability that a merge is left out when the training text is cut anew each epoch (Provilkov et
    al., 2020; 0.05 to 0.1 is usual); for bpe tokenizers."""
    subword_alpha: NonNegativeFloat = 0.0
    """Unigram sampling: the training text is cut anew each epoch, each way with its probability to this power (Kudo,
    2018; 0.1 to 0.5 is usual); for unigram tokenizers; 0 takes the likeliest way."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of training's passes; auto takes bfloat16 where the hardware has it, float16 on older GPUs."""
    deterministic: bool = False
    """Let a resumed run equal an uninterrupted one bit for bit on a GPU too, as it does on a CPU: operations that sum
    in an order that changes are replaced or refused, which takes longer."""
    ema: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Decay an update of the moving average of the weights that is validated and saved; 0 switches it off."""
    average_last: NonNegativeInt = 0
    """Average this many of the last checkpoints when training ends, validated like the others; 0 switches it off."""
    validate_every: PositiveInt = 500
    """Updates from one validation, and checkpoint, to the next."""
    validate_segments: PositiveInt | None = None
    """Validation segments to decode for BLEU, the first ones of each corpus by its share; all if left out."""
    keep_last: PositiveInt = 3
    """Checkpoints kept, counted from the last."""
    keep_best: PositiveInt = 1
    """Checkpoints kept by validation BLEU besides."""
    log_every: PositiveInt = 50
    """Updates from one line of metrics to the next."""


class DecodingSettings(Settings):
    """Translation, in validation and by `translate`."""

    method: Literal["greedy", "beam", "sample"] = "beam"
    beam: Hypotheses = 5
    """Hypotheses kept for each segment by beam search."""
    length_penalty: NonNegativeFloat = 1.0
    """Exponent of the length that a hypothesis's log-probability is divided by; 0 is the plain sum."""
    coverage_penalty: NonNegativeFloat = 0.0
    """Weight of the penalty for source pieces that got little attention; needs a cross attention that has weights."""
    max_pieces: PositiveInt | None = None
    """Pieces that a translation may have at most, its end counted; if left out, what the training pairs with about as
    long a source have at most, and a few more."""
    no_repeat_ngram: NonNegativeInt = 0
    """Forbid a sequence of this many pieces to appear twice; 0 allows all."""
    n_best: Hypotheses = 1
    """Translations given for each segment, best first."""
    temperature: PositiveFloat = 1.0
    """Divides the logits before sampling."""
    top_k: NonNegativeInt = 0
    """Sample among this many most likely pieces; 0 means all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample among the most likely pieces that together reach this probability."""
    seed: Seed = 1
    """Seed of sampling."""
    batch_tokens: PositiveInt = 8_192
    """Padded source pieces a batch, at most, all hypotheses counted; on a CPU up to eight batches are worked on at
    once."""

    @model_validator(mode="after")
    def _n_best_fits_the_beam(self) -> Self:
        if self.method != "sample" and self.n_best > (self.beam if self.method == "beam" else 1):
            raise ValueError(f"decoding.n_best = {self.n_best} is more than the hypotheses that {self.method} keeps")
        return self


class ScoringSettings(Settings):
    """Scores, in validation and by `score`."""

    tokenize: str | None = None
    """BLEU's tokenizer, as sacrebleu names it; if left out, that of the target language: zh, ja-mecab or ko-mecab where
    installed, char for Thai, Lao, Khmer and Burmese, else 13a."""
    lowercase: bool = False
    """Ignore case in BLEU, chrF and exact match."""
    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] = ("BLEU", "chrF", "TER")
    """What `score` computes; `exact` is the share of segments that are exactly right. Validation goes by BLEU."""


class Recipe(Settings):
    """Every setting of an experiment; all commands read the same one."""

    preset: Preset = "tiny"
    """The size of the model and the training settings that go with it."""
    seed: Seed = 1
    """Seed of initialisation, dropout, data order and everything mechanisms draw."""
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    attention: AttentionSettings = AttentionSettings()
    training: TrainingSettings = TrainingSettings()
    decoding: DecodingSettings = DecodingSettings()
    scoring: ScoringSettings = ScoringSettings()


def load_recipe(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe from a YAML file (all defaults if None), with nested `overrides` on top.

    `path` may be the name of a recipe that comes with mtkit. Environment variables in its paths are filled in; relative
    ones are relative to the current folder, as they are on the command line.

    Raises: RecipeError naming the file, the setting, the value and the rule.
    """
    if path is None:
        return make_recipe(overrides or {})
    path = find_recipe(path)
    return make_recipe(merged(with_variables(read_settings(path), path), overrides or {}), origin=str(path))


def make_recipe(given: Mapping[str, Any], origin: str | None = None) -> Recipe:
    """The recipe of nested settings, the preset's filled in. Raises: RecipeError, beginning with `origin`."""
    preset, where = given.get("preset", "tiny"), f"{origin}: " if origin else ""
    if preset not in get_args(Preset):
        names = list(get_args(Preset))
        hint = did_you_mean(str(preset), names)
        raise RecipeError(f"{where}no preset '{preset}'{hint}; the presets are {', '.join(names)}")
    try:
        return Recipe.model_validate(merged(PRESETS[preset], given))
    except PydanticError as error:
        raise RecipeError(where + _explain(error)) from error


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings laid over each other; `above` wins."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        result[key] = merged(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return result


def differences(one: Any, other: Any, prefix: str = "") -> list[str]:
    """The settings in which two dumped recipes differ, each as "training.peak_rate: 0.001 -> 0.002"."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = list(one) + [key for key in other if key not in one]
        return [
            line
            for key in keys
            for line in differences(one.get(key), other.get(key), f"{prefix}.{key}" if prefix else str(key))
        ]
    return [] if one == other else [f"{prefix}: {one} -> {other}"]


def _explain(error: PydanticError) -> str:
    """The first fault of a recipe, in one line."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        return f"unknown setting '{'.'.join(place)}'{did_you_mean(place[-1], _keys_at(place[:-1]))}"
    return explain(error)


def _keys_at(place: list[str]) -> list[str]:
    group: Any = Recipe
    for part in place:
        if part not in group.model_fields:
            continue  # the place in a list, or a name in a mapping
        group = next(_groups(group.model_fields[part].annotation), None)
        if group is None:
            return []
    return list(group.model_fields)


def _groups(annotation: Any) -> Iterator[Any]:
    """The groups of settings that a type is, or holds."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for each in get_args(annotation):
        yield from _groups(each)
