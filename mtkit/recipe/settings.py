"""Settings of decoding and training, presets, and the base class of all settings groups with its number bounds."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

RUNS = Path("mtkit-runs")
"""Default folder of runs."""


def run_folder_of(named: Path) -> Path:
    """Return the folder of a run from its folder or from its name in `RUNS`.

    A plain name is a folder only if this folder contains a run.json.
    """
    return RUNS / named if named.name == str(named) and not (named / "run.json").is_file() else named


MOST = 2**31 - 1
"""Maximum of a number: larger values are typing errors and would overflow in computations."""

LEAST = 1e-37
"""Minimum of a positive number: float32, and processors that flush denormals, round smaller values to 0."""

PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
PositiveFloat = Annotated[float, Field(ge=LEAST, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST)]

Operations = Annotated[float, Field(ge=1, le=1e36)]
"""A number of operations."""

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""Random seed that every generator accepts."""


class Settings(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would convert `ema: false` to 0."""
        if isinstance(value, bool) and not _accepts_bool(cls.model_fields[str(info.field_name)].annotation):
            raise PydanticCustomError("boolean", "should not be true or false")
        return value


def _accepts_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_accepts_bool, get_args(annotation)))


_SIX_LAYERS = {"encoder_layers": 6, "decoder_layers": 6, "norm": "post"}
_LONG_TRAINING = {
    "batch_tokens": 25_000,
    "warmup_updates": 4_000,
    "clip_norm": 0.0,
    "validate_every": 2_000,
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "model": {"d_model": 128, "heads": 4, "feed_forward": 512, "encoder_layers": 2, "decoder_layers": 2},
        "training": {"max_updates": 1_000},
    },
    "small": {
        "model": {"d_model": 256, "heads": 4, "feed_forward": 1024, "encoder_layers": 3, "decoder_layers": 3},
        "training": {"batch_tokens": 1_000, "cooldown": 0.25, "max_updates": 30_000, "validate_every": 2_000},
    },
    "base": {
        "model": _SIX_LAYERS | {"d_model": 512, "heads": 8, "feed_forward": 2048},
        "training": _LONG_TRAINING | {"peak_rate": 7.0e-4, "max_updates": 100_000},
    },
    "big": {
        "model": _SIX_LAYERS | {"d_model": 1024, "heads": 16, "feed_forward": 4096, "dropout": 0.3},
        "training": _LONG_TRAINING | {"peak_rate": 4.9e-4, "max_updates": 300_000},
    },
}
"""Base and big are the models of "Attention Is All You Need" (Vaswani et al., 2017), table 3; their learning rates
follow its equation 3."""


MOST_HYPOTHESES = 1_000
Hypotheses = Annotated[int, Field(gt=0, le=MOST_HYPOTHESES)]

SAMPLES = 64
"""Default number of samples for minimum Bayes risk."""

ONLY_WITH = {
    "beam": ("beam", "coverage_penalty"),
    "sample": ("temperature", "top_k", "top_p", "epsilon", "samples", "seed"),
}
"""Settings by the only method that uses them."""


def with_method(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's settings; a beam size without a method selects beam search, and greedy search disables mbr."""
    implied = {"method": "beam"} if "beam" in given and "method" not in given else {}
    disabled = {"mbr": None, "samples": None} if given.get("method") == "greedy" else {}
    return {**disabled, **given, **implied}


class DecodingSettings(Settings):
    """Decoding, in validation and in `translate`."""

    method: Literal["greedy", "beam", "sample"] = "beam"
    """Search algorithm."""
    beam: Hypotheses = 5
    """Beam size."""
    length_penalty: NonNegativeFloat = 1.0
    """Exponent of the length normalisation log-probability / length ^ exponent; 0 disables it."""
    coverage_penalty: NonNegativeFloat = 0.0
    """Weight of the penalty for unattended source pieces. Requires a cross attention with weights; 0 disables it."""
    max_pieces: PositiveInt | None = None
    """Maximum pieces of a translation, including the end mark. Default: slightly more than the longest target
    of training pairs with a similar source length, at least 2 x the source's pieces, and at least 20."""
    document_pieces: PositiveInt | None = None
    """Maximum source pieces of lines of a document that are translated at once. Default: as in training. Documents
    only."""
    context: NonNegativeInt = 0
    """Sentences that are read again, with their translations, before the next sentences of a document, if the document
    is too long to be translated at once. Documents only."""
    no_repeat_ngram: NonNegativeInt = 0
    """Forbid repeated n-grams of this many pieces; 0 disables this."""
    n_best: Hypotheses = 1
    """Translations per segment, best first."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature: divisor of the logits."""
    top_k: NonNegativeInt = 0
    """Sample from the k most probable pieces; 0 means all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the most probable pieces whose cumulative probability reaches this value."""
    epsilon: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Sample from the pieces with at least this probability (Hewitt et al., 2022), or the most probable one; 0.02 suits
    `mbr`."""
    seed: Seed = 1
    """Random seed of sampling."""
    mbr: Literal["chrf", "bleu"] | None = None
    """Choose the hypothesis with the highest mean chrF or BLEU against all hypotheses of beam search, or all samples
    (minimum Bayes risk)."""
    samples: Hypotheses | None = None
    """Samples per segment among which `mbr` chooses. Default: 64."""
    batch_tokens: PositiveInt | None = None
    """Maximum padded source pieces per batch, counted once per hypothesis. Default: 65,536 on a GPU, 16,384 on a
    CPU, 8,192 there with one hypothesis per segment. On a CPU the commands decode one batch per thread in parallel."""

    @property
    def hypotheses(self) -> int:
        """The number of hypotheses that the search finds for each segment."""
        if self.method == "sample":
            return self.n_best if self.mbr is None else self.samples or SAMPLES
        return self.beam if self.method == "beam" else 1

    @model_validator(mode="after")
    def _mbr_has_hypotheses(self) -> Self:
        if self.mbr is not None and self.method == "greedy":
            raise ValueError("decoding.mbr chooses among several hypotheses; set decoding.method to beam or sample")
        if self.mbr is None and self.samples is not None:
            raise ValueError("decoding.samples needs decoding.mbr; without it, set decoding.n_best")
        return self

    @model_validator(mode="after")
    def _n_best_fits_the_search(self) -> Self:
        if self.n_best > self.hypotheses:
            what = f"{self.method} search" if self.method != "sample" else "decoding.samples"
            raise ValueError(f"decoding.n_best = {self.n_best} exceeds the number of hypotheses of {what}")
        return self

    def without_effect(self, given: Collection[str]) -> tuple[str, str] | None:
        """Return the first given setting that this method ignores, and the method that uses it.

        A coverage penalty of 0 and no number of samples are valid with every method: they disable something.
        """
        pairs = (
            (setting, method)
            for method, settings in ONLY_WITH.items()
            for setting in settings
            if setting not in ("coverage_penalty", "samples") or getattr(self, setting)
        )
        return next((pair for pair in pairs if pair[0] in given and pair[1] != self.method), None)


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Target = Literal["query", "key", "value", "output", "feed_forward"]
BestBy = Literal["bleu", "chrf", "loss", "exact", "token", "ter"]


def _listed(names: Any) -> Any:
    """Return a list unchanged, and wrap a single name in a list."""
    return [names] if isinstance(names, str) else names


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al., 2021): a trained product of two small matrices is added to each adapted matrix."""

    rank: PositiveInt = 8
    """Rank of the product."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = ("query", "value")
    """Adapted matrices: query, key, value and output projections of all attentions, and feed_forward."""
    alpha: PositiveFloat | None = None
    """Numerator of the product's factor alpha / rank. Default: the rank, i.e. a factor of 1."""


LIMITS = {
    "max_updates": "updates",
    "max_epochs": "epochs",
    "max_tokens": "target tokens",
    "max_flops": "training FLOPs",
    "max_minutes": "minutes",
}
"""Settings that limit the length of a training in advance, with their units."""


class TrainingSettings(Settings):
    """The training loop."""

    init_from: Path | None = None
    """Run (name or folder) whose best weights initialise a new run. By default, the new run inherits the section
    `attention`, and `model` unless a preset is set."""
    freeze: Annotated[tuple[str, ...], BeforeValidator(_listed, json_schema_input_type=str | tuple[str, ...])] = ()
    """Parameters that are not trained: groups (embeddings, encoder, decoder, output), layers (decoder.0), or parts
    (feed_forward, cross_attention.q_proj)."""
    lora: LoraSettings | None = None
    """Train only low-rank adapters. Requires `init_from`."""

    batch_tokens: PositiveInt = 2_048
    """Maximum padded pieces per batch, of the longer side. With subword sampling, the rows of a batch are chosen by
    their pieces before sampling."""
    corpus_temperature: PositiveFloat = 1.0
    """Temperature of sampling over several corpora: their shares of an epoch are proportional to size ^ (1 /
    temperature), weights included. 1 keeps their sizes; larger values repeat small corpora and draw from large ones."""
    accumulate: PositiveInt = 1
    """Batches per update. Each token has the same weight in the summed gradient."""
    max_updates: PositiveInt | None = None
    """Maximum updates."""
    max_epochs: PositiveInt | None = None
    """Maximum epochs."""
    max_tokens: Annotated[int, Field(gt=0, lt=2**63)] | None = None
    """Maximum target tokens of all processes together, end marks counted. The last update may exceed it."""
    max_flops: Operations | None = None
    """Maximum FLOPs of training: target tokens times FLOPs per target token, which are counted before the first update
    on a few batches: products of forward pass, loss and backward pass. The last update may exceed it."""
    max_minutes: PositiveFloat | None = None
    """Maximum minutes of training, including the time before a resume."""
    best_by: BestBy = "bleu"
    """Validation score that selects the best checkpoint and resets patience: BLEU, chrF, loss, exact match, token match
    or TER. Lower is better for loss and TER. If scores are equal, the checkpoint with the lowest loss is best. Default
    of tasks: exact."""
    patience: PositiveInt | None = None
    """Maximum validations in a row without a better score by `best_by`."""
    least_improvement: NonNegativeFloat = 0.0
    """Minimum improvement of the `best_by` score that resets patience. With 0, every new best validation resets it."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimiser. muon orthogonalises the updates of the layers' matrices (Jordan et al., 2024), and AdamW updates
    embeddings, output projection and vectors."""
    muon_rate: PositiveFloat = 0.02
    """Peak learning rate of muon's matrices, on the schedule of `peak_rate`. An update of an R x C matrix has singular
    values near this rate times sqrt(max(1, R / C))."""
    peak_rate: PositiveFloat = 1.5e-3
    """Peak learning rate; with the schedule noam its factor, 1 in the paper."""
    schedule: Literal["noam", "inverse-sqrt", "cosine"] = "inverse-sqrt"
    """Decay of the learning rate after the warm-up. noam peaks at `peak_rate` / sqrt(d_model * warmup_updates)."""
    warmup_updates: NonNegativeInt = 400
    """Updates of the warm-up, in which the learning rate rises from 0 to its peak."""
    cooldown: float = Field(default=0.0, ge=0.0, le=1.0)
    """Final share of training in which the learning rate falls linearly to 0. Requires a training limit."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Adam's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-9
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay of matrices per update, as a multiple of the learning rate; vectors and scalars do not decay."""
    clip_norm: NonNegativeFloat = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    label_smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Probability mass spread uniformly over the vocabulary."""
    r_drop: NonNegativeFloat = 0.0
    """R-Drop (Wu et al., 2021): weight alpha of the divergence between the predictions of two passes over each batch
    with different dropout; usually 1 to 5. The loss is half the paper's: a mean over passes. An update takes twice
    the time, and a batch twice the memory. Requires dropout; 0 disables it."""
    subword_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """BPE dropout: probability of skipping a merge when each epoch segments the training text again (Provilkov et al.,
    2020; usually 0.05 to 0.1). Only for bpe tokenizers; 0 disables it."""
    subword_alpha: NonNegativeFloat = 0.0
    """Unigram sampling: each epoch segments the training text again, and samples a segmentation by its probability to
    this power (Kudo, 2018; usually 0.1 to 0.5). Only for unigram tokenizers; 0 disables it."""
    capitals: float = Field(default=0.0, ge=0.0, le=1.0)
    """Probability that a training pair is in capitals on both sides; each epoch draws others (usually 0.05)."""
    typos: float = Field(default=0.0, ge=0.0, le=1.0)
    """Probability that a training source gets typing errors, one for every ten words; each epoch draws others
    (usually 0.1)."""
    precision: Literal["auto", "float32", "tf32", "bfloat16", "float16"] = "auto"
    """Arithmetic of training. auto is bfloat16 if the hardware has it, float16 on older GPUs, else float32. tf32 is
    float32 with products whose factors are rounded to 11 bits, which GPUs since Ampere multiply faster. On CPUs
    with bfloat16 units, it times a few updates of bfloat16 and float32 before the first update, and uses the faster. On
    a GPU, in any precision, kernels in Triton and CUDA graphs are timed so and used if they are faster, unless results
    must be deterministic or several GPUs train."""
    sum_gradients_in: Literal["float32", "bfloat16"] = "float32"
    """Type of the gradients in the all-reduce between processes. bfloat16 halves the traffic, and rounds each gradient
    to 3 digits."""
    shard: bool = False
    """Shard gradients, optimiser state and, between updates, weights over the N processes (ZeRO): each holds 1/N, and
    all weights during an update. Files are the same as without. It has no effect on a single process."""
    checkpoint_activations: bool = False
    """Keep only the input of each layer for the backward pass, which computes the layer again (activation
    checkpointing): less memory, and about a third more computation. The results are the same."""
    deterministic: bool = False
    """Use deterministic operations on GPUs: a resumed run is then bit-identical to an uninterrupted run, as on CPUs.
    Operations that are not deterministic are replaced, which is slower, or raise an error."""
    ema: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Decay per update of the weights' moving average, which is validated and saved; 0 disables it."""
    average_last: NonNegativeInt = 0
    """Number of last checkpoints to average at the end of training; 0 disables averaging."""
    validate_every: PositiveInt = 500
    """Updates per validation and checkpoint."""
    validate_segments: PositiveInt | None = None
    """Validation segments to translate for BLEU: the first of each corpus, in proportion to its size. Default: all."""
    attention_entropy: NonNegativeInt = 0
    """Validation segments on which each validation measures the entropy of attention weights, by layer and head, for
    metrics.jsonl and TensorBoard. 0: none."""
    keep_last: PositiveInt = 3
    """Last checkpoints to keep."""
    keep_best: PositiveInt = 1
    """Best checkpoints by `best_by` to keep."""
    log_every: PositiveInt = 50
    """Updates per line of metrics in the log."""

    @property
    def limits(self) -> dict[str, float]:
        """The `LIMITS` that are set, by name."""
        values = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _adapters_freeze_all_else(self) -> Self:
        if self.lora is not None and self.freeze:
            raise ValueError("training.lora trains only its adapters; leave training.freeze out")
        if self.lora is not None and self.init_from is None:
            raise ValueError("training.lora needs a trained model; give --init-from RUN (training.init_from)")
        if self.optimizer == "muon" and (self.lora is not None or self.shard):
            other = "lora" if self.lora is not None else "shard"
            raise ValueError(f"training.optimizer = muon updates whole matrices; leave training.{other} out")
        if self.lora is not None and self.shard:
            raise ValueError("training.shard does not support training.lora; leave training.shard out")
        return self
