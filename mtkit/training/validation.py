"""Validation: the loss, and BLEU computed by the code of `mtkit translate` and `mtkit score`."""

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtkit.data.batches import make_batch
from mtkit.data.epochs import plan
from mtkit.data.prepared import Prepared
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.lines.source import TrainedOn
from mtkit.decoding.translate import translate_lines
from mtkit.errors import DataError
from mtkit.evaluation.heads import entropies
from mtkit.evaluation.scores import Score, doubt, score_corpus
from mtkit.memory import Halving, peak_bytes
from mtkit.model.adaptation import merged_in_place
from mtkit.model.network import Network
from mtkit.process import release_freed_memory
from mtkit.recipe import Recipe
from mtkit.recipe.settings import BestBy
from mtkit.runs import Run
from mtkit.storage.files import json_text
from mtkit.terminal import Say, shortened
from mtkit.text.languages import installed_tokenizer, languages_of
from mtkit.training.device_batch import DeviceBatch
from mtkit.training.interruption import Interruption
from mtkit.training.loss import token_loss
from mtkit.training.precision import Precision
from mtkit.training.progress import Progress
from mtkit.training.world import World


class _InterruptedError(Exception):
    """A signal arrived during translation."""


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
    """Peak memory of the process so far, validation included."""
    best_by: BestBy = "bleu"
    other: Score | None = None
    """Score by `best_by`, if that is neither BLEU nor the loss."""
    shows_bleu: bool = True
    """Whether people see BLEU: it is among the recipe's metrics, or there is no other score."""
    entropies: dict[str, float] = field(default_factory=dict)
    """Entropies of attention weights (`mtkit.evaluation.heads.entropies`), if the recipe sets them."""

    @property
    def perplexity(self) -> float:
        """The exponential of the nll, which is capped at 99 nats."""
        return math.exp(min(self.nll, 99.0))

    def numbers(self) -> dict[str, float | str]:
        """Return the numbers for one line of metrics.jsonl."""
        names = ("nll", "perplexity", "bleu", "signature", "seconds", "peak_bytes")
        numbers = {name: getattr(self, name) for name in names}
        if self.other is not None:
            numbers |= {self.best_by: self.other.value, f"{self.best_by}_signature": self.other.signature}
        return numbers | {"best_by": self.best_by, **self.entropies}

    @property
    def scores(self) -> tuple[float, float, float]:
        """BLEU, loss, and the score that chooses the best checkpoint; a loss that is not a number is infinite."""
        loss = math.inf if math.isnan(self.nll) else self.nll
        if self.other is not None:
            return self.bleu, loss, self.other.value
        return self.bleu, loss, loss if self.best_by == "loss" else self.bleu

    def lines(self, title: str, better: bool) -> list[str]:
        """Return the result and sample translations as lines of text."""
        numbers = [f"{title}: validation loss {self.nll:.3f}", f"perplexity {self.perplexity:.2f}"]
        if self.shows_bleu:
            numbers.append(f"BLEU {self.bleu:.2f}")
        if self.other is not None:
            numbers.append(f"{self.other.name} {self.other.value:.2f}")
        signature = self.signature if self.shows_bleu or self.other is None else self.other.signature
        head = f"{', '.join(numbers)}{' (best so far)' if better else ''}, {self.seconds:.1f} s, {signature}"
        parts = ("source", "reference", "translation")
        return [head, *(f"  {part:<12}{shortened(getattr(sample, part))}" for sample in self.samples for part in parts)]


def validate(
    model: Network,
    recipe: Recipe,
    prepared: Prepared,
    folder: Path,
    precision: Precision,
    interruption: Interruption,
    world: World,
) -> Validation | None:
    """Loss and BLEU of the model's current weights; restores its mode. None if interrupted.

    `folder` is the run's: as in `translate`, the lengths of its training pairs limit translations. The processes of
    `world`, which all have these weights, share the work; only the first one returns a result, the others None.
    """

    def check_interruption(lines: int) -> None:
        if interruption.signal is not None:
            raise _InterruptedError

    begin, was_training = monotonic(), model.training
    model.eval()
    release_freed_memory()  # blocks of decoding hardly fit into the gaps that training left, and the other way round
    try:
        side = held_out(prepared, "valid").sample(recipe.training.validate_segments or len(prepared.valid))
        rows = _share(side, recipe, world)
        translations = None
        with merged_in_place(model), suppress(_InterruptedError):  # adapters are merged, as in `translate`
            nll = validation_loss(model, recipe, prepared, precision, world)
            translated = translate_lines(
                ModelEngine(model, recipe.decoding),
                prepared.tokenizers,
                side.lines(recipe.decoding, trained_on=TrainedOn.of([Run(folder)])).at(rows),
                on_progress=check_interruption,
            )
            translations = [(row, best[0].text) for row, best in zip(rows, translated, strict=True)]
    finally:
        model.train(was_training)
        release_freed_memory()
    # also after a signal, so that all processes know of it
    shares = world.gather(translations)
    done = [] if shares is None else [share for share in shares if share is not None]
    if shares is None or len(done) < len(shares):
        return None
    hypotheses = [text for _, text in sorted(line for share in done for line in share)]
    sources, references = side.sources, side.references
    bleu, *others = _scores(hypotheses, side, recipe)
    shows_bleu = "BLEU" in recipe.scoring.metrics or not others
    segments = recipe.training.attention_entropy
    sample_rows = range(0, len(sources), max(len(sources) // 3, 1))[:3]
    return Validation(
        nll,
        bleu.value,
        bleu.signature,
        doubt=doubt([bleu], hypotheses, [references]) if shows_bleu else None,
        samples=[Sample(sources[row], references[row], hypotheses[row]) for row in sample_rows],
        seconds=monotonic() - begin,
        peak_bytes=peak_bytes(precision.device),
        best_by=recipe.training.best_by,
        other=others[0] if others else None,
        shows_bleu=shows_bleu,
        entropies=entropies(model, prepared.valid, segments) if segments else {},
    )


def dry_run_validation(model: Network, recipe: Recipe, prepared: Prepared) -> None:
    """Translate and score a segment or two, so that errors in the settings of `validate` show before training.

    Raises: DataError if no validation segment fits the model; MtkitError if settings of search or scoring do not go
    together, or a package that they need is not installed.
    """
    longest = min(model.longest_source, model.longest_target)
    if prepared.valid.too_long(longest) == len(prepared.valid):
        raise DataError(
            f"no validation segment in {prepared.folder} has at most {longest} pieces; raise model.max_length"
        )
    side, settings = held_out(prepared, "valid").sample(1), recipe.decoding.model_copy(update={"max_pieces": 2})
    engine = ModelEngine(model, settings)
    translated = translate_lines(engine, prepared.tokenizers, side.lines(settings))
    _scores([best[0].text for best in translated], side, recipe)


def scoring_fingerprint(recipe: Recipe) -> str:
    """Fingerprint of the search and scoring settings: validations with other settings are not comparable."""
    settings: list[Any] = [
        recipe.decoding.model_dump(exclude={"batch_tokens"}),
        recipe.scoring.model_dump(exclude={"metrics"}),
    ]
    if recipe.training.best_by != "bleu":
        settings.append(recipe.training.best_by)
    if recipe.scoring.tokenize is None:  # the default depends on what is installed
        settings += [installed_tokenizer(languages_of(direction)[1]) for direction in recipe.data.directions]
    return hashlib.sha256(json_text(settings, sort_keys=True).encode()).hexdigest()[:16]


def with_comparable_scores(progress: Progress, recipe: Recipe, say: Say) -> Progress:
    """Return the progress with scores of the recipe's settings only: drops other scores, and prints a line about it."""
    fingerprint = scoring_fingerprint(recipe)
    if progress.best_score is not None and progress.judged_by != fingerprint:
        say(
            "earlier validations used other settings of decoding or scoring, or another training.best_by, and are not "
            "comparable: the best checkpoint and patience start again"
        )
        progress = progress.without_scores()
    return replace(progress, judged_by=fingerprint, best_by=recipe.training.best_by)


def _scores(hypotheses: Sequence[str], side: HeldOut, recipe: Recipe) -> list[Score]:
    """BLEU, and the score by `training.best_by` if that is another metric."""
    scoring, best_by = recipe.scoring, recipe.training.best_by
    return score_corpus(
        hypotheses,
        [side.references],
        metrics=("BLEU",) if best_by in ("bleu", "loss") else ("BLEU", best_by),
        bootstrap=0,
        tokenize=scoring.tokenize,
        lowercase=scoring.lowercase,
        languages=side.target_languages,
    )


@torch.no_grad()
def validation_loss(model: Network, recipe: Recipe, prepared: Prepared, precision: Precision, world: World) -> float:
    """Unsmoothed negative log-likelihood per target token of the validation side, without segments that are too long.

    The processes of `world` compute a part of the batches each, and all return the result.
    """
    side, device = prepared.valid, precision.device
    longest = min(model.longest_source, model.longest_target)
    halving = Halving(np.maximum(side.source.lengths, side.target.lengths) + 1)

    def loss_of(rows: Sequence[int]) -> tuple[Tensor, int]:
        batch = DeviceBatch.of(make_batch(side, np.array(rows), longest), device)
        with precision.autocast():
            hidden = batch.predicting(model(**batch.inputs).hidden)
            loss = token_loss(*model.factors(hidden), batch.target, smoothing=0.0)
        return loss.nll.sum(), len(loss.nll)

    total, tokens = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device), 0
    batches = plan(side, batch_tokens=recipe.training.batch_tokens, max_length=longest, seed=0, epoch=0)
    for number in world.share(len(batches)):
        for nll, count in halving.run(loss_of, batches[number].tolist()):
            total += nll
            tokens += count
    sums = torch.tensor([float(total), float(tokens)], dtype=torch.float64)
    world.sum(sums)
    return float(sums[0] / sums[1])


def _share(side: HeldOut, recipe: Recipe, world: World) -> list[int]:
    """Return the rows of a side that this process translates; a document that is translated as one is not divided."""
    documents = side.lines(recipe.decoding).documents
    if documents is None:
        return list(world.share(len(side.sources)))
    begins = [row for row in range(len(side.sources)) if row == 0 or documents.ids[row] != documents.ids[row - 1]]
    ends = [*begins[1:], len(side.sources)]
    return [row for place in world.share(len(begins)) for row in range(begins[place], ends[place])]
