"""Validation: the loss on the validation side, and BLEU by the code that `translate` and `score` run."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtkit.data.batches import make_batch, plan
from mtkit.data.prepared import Prepared
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.lines.limits import TrainedOn
from mtkit.decoding.translate import translate_lines
from mtkit.errors import DataError
from mtkit.evaluation.metrics import installed_tokenizer
from mtkit.evaluation.scores import Score, doubt, score_corpus
from mtkit.files import json_text
from mtkit.languages import languages_of
from mtkit.model.adaptation.lora import merged_in_place
from mtkit.model.network import Network
from mtkit.out_of_memory import Halving
from mtkit.peak_memory import peak_bytes
from mtkit.recipe import Recipe
from mtkit.runs import Run
from mtkit.training.checkpoint import Progress
from mtkit.training.feed import Inputs
from mtkit.training.limits import Interruption
from mtkit.training.loss import batch_loss
from mtkit.training.optimization.optimizer import Precision
from mtkit.training.report import Say


class _InterruptedError(Exception):
    """A signal came while segments were being translated."""


@dataclass(frozen=True)
class Sample:
    """One validation segment with its translation."""

    source: str
    reference: str
    translation: str


@dataclass(frozen=True)
class Validation:
    """Loss and scores on the validation side."""

    nll: float
    """Unsmoothed negative log-likelihood per target token, in nats; its exponential is the perplexity."""
    bleu: float
    signature: str
    doubt: str | None
    """Why the BLEU may be wrong (a note for the user); None if it seems right."""
    samples: list[Sample]
    seconds: float
    peak_bytes: int
    """The most memory that the process has held, validation included."""

    @property
    def perplexity(self) -> float:
        """The exponential of the nll; that of 99 nats at most."""
        return math.exp(min(self.nll, 99.0))

    def numbers(self) -> dict[str, float | str]:
        """The numbers for one line of metrics.jsonl."""
        names = ("nll", "perplexity", "bleu", "signature", "seconds", "peak_bytes")
        return {name: getattr(self, name) for name in names}

    def lines(self, title: str, better: bool) -> list[str]:
        """The result and sample translations as lines of text."""
        head = (
            f"{title}: validation loss {self.nll:.3f}, perplexity {self.perplexity:.2f}, BLEU {self.bleu:.2f}"
            f"{' (best so far)' if better else ''}, {self.seconds:.1f} s, {self.signature}"
        )
        parts = ("source", "reference", "translation")
        return [head, *(f"  {part:<12}{getattr(sample, part)}" for sample in self.samples for part in parts)]


def validate(
    model: Network,
    recipe: Recipe,
    prepared: Prepared,
    folder: Path,
    precision: Precision,
    interruption: Interruption,
) -> Validation | None:
    """Loss and BLEU with the weights that the model has; leaves it in the mode it was in. None if interrupted.

    `folder` is the run's: what it keeps of the training pairs decides here as in `translate`.
    """

    def go_on(lines: int) -> None:
        if interruption.signal is not None:
            raise _InterruptedError

    begin, was_training = monotonic(), model.training
    model.eval()
    try:
        side = held_out(prepared, "valid").sample(recipe.training.validate_segments or len(prepared.valid))
        sources, references = side.sources, side.references
        with merged_in_place(model):  # as `translate` has it
            nll = validation_loss(model, recipe, prepared, precision)
            translated = translate_lines(
                ModelEngine(model, recipe.decoding),
                prepared.tokenizers,
                sources,
                trained_on=TrainedOn.of([Run(folder)]),
                on_progress=go_on,
                **side.how(recipe.decoding),
            )
    except _InterruptedError:
        return None
    finally:
        model.train(was_training)
    hypotheses = [each[0].text for each in translated]
    bleu = _score(hypotheses, side, recipe)
    rows = range(0, len(sources), max(len(sources) // 3, 1))[:3]
    shown = [Sample(sources[row], references[row], hypotheses[row]) for row in rows]
    doubtful = doubt([bleu], hypotheses, [references])
    return Validation(
        nll, bleu.value, bleu.signature, doubtful, shown, monotonic() - begin, peak_bytes(precision.device)
    )


def rehearse(model: Network, recipe: Recipe, prepared: Prepared) -> None:
    """Translate and score a segment or two as `validate` does: what it lacks is to show before the first update.

    Raises: DataError where no validation segment fits the model; MtkitError where settings of search or scores do not
    go together, or what they need is not installed.
    """
    longest = min(model.longest_source, model.longest_target)
    if prepared.valid.too_long(longest) == len(prepared.valid):
        raise DataError(
            f"no validation segment in {prepared.folder} has at most {longest} pieces; raise model.max_length"
        )
    side, settings = held_out(prepared, "valid").sample(1), recipe.decoding.model_copy(update={"max_pieces": 2})
    engine = ModelEngine(model, settings)
    translated = translate_lines(engine, prepared.tokenizers, side.sources, **side.how(settings))
    _score([each[0].text for each in translated], side, recipe)


def judged_by(recipe: Recipe) -> str:
    """Fingerprint of the settings of search and scores: validations by other ones do not compare."""
    settings: list[Any] = [
        recipe.decoding.model_dump(exclude={"batch_tokens"}),
        recipe.scoring.model_dump(exclude={"metrics"}),
    ]
    if recipe.scoring.tokenize is None:  # what is installed may change
        settings += [installed_tokenizer(languages_of(each)[1]) for each in recipe.data.directions]
    return hashlib.sha256(json_text(settings, sort_keys=True).encode()).hexdigest()[:16]


def comparable(progress: Progress, recipe: Recipe, say: Say) -> Progress:
    """The place in training, without scores that were made by other settings than the recipe's, of which it tells."""
    judged = judged_by(recipe)
    if progress.best_bleu is not None and progress.judged_by != judged:
        say(
            "earlier validations used other settings of decoding or scoring and are not comparable: "
            "the best checkpoint and patience start again"
        )
        progress = replace(progress, validated=-1, bleu=None, nll=None, best_bleu=None, best_nll=None, stale=0)
    return replace(progress, judged_by=judged)


def _score(hypotheses: Sequence[str], side: HeldOut, recipe: Recipe) -> Score:
    scoring = recipe.scoring
    (bleu,) = score_corpus(
        hypotheses,
        [side.references],
        metrics=("BLEU",),
        bootstrap=0,
        tokenize=scoring.tokenize,
        lowercase=scoring.lowercase,
        languages=side.target_languages,
    )
    return bleu


@torch.no_grad()
def validation_loss(model: Network, recipe: Recipe, prepared: Prepared, precision: Precision) -> float:
    """Unsmoothed negative log-likelihood per target token of the validation side, segments too long left out."""
    side, device = prepared.valid, precision.device
    longest = min(model.longest_source, model.longest_target)
    halving = Halving(np.maximum(side.source.lengths, side.target.lengths) + 1)

    def part(rows: Sequence[int]) -> tuple[Tensor, int]:
        inputs = Inputs.of(make_batch(side, np.array(rows), longest), device)
        loss, _ = batch_loss(model, inputs, precision, smoothing=0.0)
        return loss.nll.sum(), loss.tokens

    total, tokens = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device), 0
    for batch in plan(side, batch_tokens=recipe.training.batch_tokens, max_length=longest, seed=0, epoch=0):
        for nll, count in halving.run(part, batch.tolist()):
            total += nll
            tokens += count
    return float(total) / tokens
