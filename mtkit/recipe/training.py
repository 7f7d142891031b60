"""The recipe's settings of the training loop."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mtkit.recipe.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Target = Literal["query", "key", "value", "output", "feed_forward"]
BestBy = Literal["bleu", "chrf", "loss", "exact", "ter"]


def _listed(given: Any) -> Any:
    """One name stands for a list of it."""
    return [given] if isinstance(given, str) else given


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al., 2021): beside each adapted matrix a product of two small ones is trained."""

    rank: PositiveInt = 8
    """Rank of the product."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = ("query", "value")
    """Adapted matrices: query, key, value and output projections of all attentions, and feed_forward."""
    alpha: PositiveFloat | None = None
    """Numerator of the product's factor, alpha / rank. Default: the rank, a factor of 1."""


class TrainingSettings(Settings):
    """The training loop."""

    init_from: Path | None = None
    """Run, by name or folder, whose best weights a new run starts with. The sections `model` and `attention` are that
    run's by default, the former unless a preset is named."""
    freeze: Annotated[tuple[str, ...], BeforeValidator(_listed, json_schema_input_type=str | tuple[str, ...])] = ()
    """Parameters that are not trained: groups (embeddings, encoder, decoder, output), layers (decoder.0), or parts
    (feed_forward, cross_attention.q_proj)."""
    lora: LoraSettings | None = None
    """Train low-rank adapters, and nothing else. It needs `init_from`."""

    batch_tokens: PositiveInt = 2_048
    """Maximum padded pieces per batch, of the longer side. With pieces drawn anew each epoch, the batch has the rows
    that hold this many pieces before the draw."""
    accumulate: PositiveInt = 1
    """Batches per update. Each token has the same weight in the summed gradient."""
    max_updates: PositiveInt | None = None
    """Maximum updates."""
    max_epochs: PositiveInt | None = None
    """Maximum epochs."""
    max_minutes: PositiveFloat | None = None
    """Maximum minutes of training, including those before a resume."""
    best_by: BestBy = "bleu"
    """Validation score that chooses the best checkpoint and that patience follows: BLEU, chrF, loss, exact match or
    TER. Lower is better for loss and TER. Of checkpoints with equal scores the one with the lowest loss is best."""
    patience: PositiveInt | None = None
    """Maximum validations in a row without a better score by `best_by`."""
    least_improvement: NonNegativeFloat = 0.0
    """Least improvement of the score by `best_by` that resets patience. With 0 every validation that becomes the best
    one resets it."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimiser. muon gives the updates of the layers' matrices equal singular values (Jordan et al., 2024); AdamW
    updates embeddings, output projection and vectors then."""
    muon_rate: PositiveFloat = 0.02
    """Peak rate of muon's matrices; it rises and falls as the learning rate. An update of a matrix of R rows and C
    columns has singular values near this rate times sqrt(max(1, R / C))."""
    peak_rate: PositiveFloat = 1.5e-3
    """Peak learning rate."""
    schedule: Literal["noam", "inverse-sqrt", "cosine"] = "inverse-sqrt"
    """Decay of the learning rate after the warm-up. noam peaks at `peak_rate` / sqrt(d_model * warmup_updates)."""
    warmup_updates: NonNegativeInt = 400
    """Updates over which the learning rate rises from 0 to its peak."""
    cooldown: float = Field(default=0.0, ge=0.0, le=1.0)
    """Final share of training over which the learning rate falls linearly to 0. It needs a limit of training."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """Adam's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-9
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay of matrices per update, in learning rates; vectors and scalars are not decayed."""
    clip_norm: NonNegativeFloat = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    label_smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Probability mass spread uniformly over the vocabulary."""
    r_drop: NonNegativeFloat = 0.0
    """R-Drop (Wu et al., 2021): weight alpha of the divergence between the predictions of two passes over each batch
    with different dropout; usually 1 to 5. The loss is half of theirs: a mean over passes. An update takes twice the
    time and a batch twice the memory. It needs dropout; 0 disables it."""
    subword_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """BPE dropout: probability of skipping a merge when training text is segmented anew each epoch (Provilkov et al.,
    2020; usually 0.05 to 0.1). For bpe tokenizers; 0 disables it."""
    subword_alpha: NonNegativeFloat = 0.0
    """Unigram sampling: training text is segmented anew each epoch, each segmentation with its probability to this
    power (Kudo, 2018; usually 0.1 to 0.5). For unigram tokenizers; 0 disables it."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of training. auto is bfloat16 where the hardware has it, float16 on older GPUs, else float32. On CPUs
    with bfloat16 units it is the faster of bfloat16 and float32, by a few updates of each before the first."""
    sum_gradients_in: Literal["float32", "bfloat16"] = "float32"
    """Type in which processes send their gradients to one another. bfloat16 halves what travels, and rounds each
    gradient to 3 digits."""
    shard: bool = False
    """Split gradients, optimiser state and, between updates, weights over the processes (ZeRO): a process keeps an Nth,
    and whole weights during an update. Runs are the same on disk. One process has nothing to split."""
    deterministic: bool = False
    """Use deterministic operations on GPUs: a resumed run is then bit-identical to an uninterrupted one, as it is on
    CPUs. Operations that are not deterministic are replaced, which is slower, or refused."""
    ema: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Decay per update of the moving average of the weights, which is validated and saved; 0 disables it."""
    average_last: NonNegativeInt = 0
    """Number of last checkpoints to average at the end of training; 0 disables averaging."""
    validate_every: PositiveInt = 500
    """Updates per validation and checkpoint."""
    validate_segments: PositiveInt | None = None
    """Validation segments to translate for BLEU: the first of each corpus, by its share. Default: all."""
    keep_last: PositiveInt = 3
    """Last checkpoints to keep."""
    keep_best: PositiveInt = 1
    """Best checkpoints by `best_by` to keep."""
    log_every: PositiveInt = 50
    """Updates per line of metrics."""

    @model_validator(mode="after")
    def _adapters_freeze_all_else(self) -> Self:
        if self.lora is not None and self.freeze:
            raise ValueError("training.lora freezes all but its adapters; leave training.freeze out")
        if self.lora is not None and self.init_from is None:
            raise ValueError("training.lora adapts a trained model; name it: --init-from RUN (training.init_from)")
        if self.optimizer == "muon" and (self.lora is not None or self.shard):
            other = "lora" if self.lora is not None else "shard"
            raise ValueError(f"training.optimizer = muon updates whole matrices; leave training.{other} out")
        if self.lora is not None and self.shard:
            raise ValueError("training.shard does not split adapters, which are small; leave training.shard out")
        return self
