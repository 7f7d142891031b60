"""Validation: the loss on the validation side, and BLEU by the code that `translate` and `score` run."""

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from mtkit.evaluation.scores import Score, doubt, installed_tokenizer, score_corpus
from mtkit.memory import Halving, peak_bytes
from mtkit.model.adaptation import merged_in_place
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.recipe.settings import BestBy
from mtkit.runs import Run
from mtkit.storage.files import json_text
from mtkit.terminal import shortened
from mtkit.text.languages import languages_of
from mtkit.training.data_loader import Inputs
from mtkit.training.loss import batch_loss
from mtkit.training.metrics import Say
from mtkit.training.precision import Precision
from mtkit.training.progress import Interruption, Progress
from mtkit.training.world import World


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
    best_by: BestBy = "bleu"
    other: Score | None = None
    """Score by `best_by`, if that is neither BLEU nor the loss."""

    @property
    def perplexity(self) -> float:
        """The exponential of the nll; that of 99 nats at most."""
        return math.exp(min(self.nll, 99.0))

    def numbers(self) -> dict[str, float | str]:
        """The numbers for one line of metrics.jsonl."""
        names = ("nll", "perplexity", "bleu", "signature", "seconds", "peak_bytes")
        numbers = {name: getattr(self, name) for name in names}
        if self.other is not None:
            numbers |= {self.best_by: self.other.value, f"{self.best_by}_signature": self.other.signature}
        return numbers | {"best_by": self.best_by}

    @property
    def scores(self) -> tuple[float, float, float]:
        """BLEU, loss, and the score that chooses the best checkpoint."""
        if self.other is not None:
            return self.bleu, self.nll, self.other.value
        return self.bleu, self.nll, self.nll if self.best_by == "loss" else self.bleu

    def lines(self, title: str, better: bool) -> list[str]:
        """The result and sample translations as lines of text."""
        head = (
            f"{title}: validation loss {self.nll:.3f}, perplexity {self.perplexity:.2f}, BLEU {self.bleu:.2f}"
            + (f", {self.other.name} {self.other.value:.2f}" if self.other else "")
            + f"{' (best so far)' if better else ''}, {self.seconds:.1f} s, {self.signature}"
        )
        parts = ("source", "reference", "translation")
        return [head, *(f"  {part:<12}{shortened(getattr(sample, part))}" for sample in self.samples for part in parts)]


def validate(
    model: Network,
    recipe: Recipe,
    prepared: Prepared,
    folder: Path,
    precision: Precision,
    interruption: Interruption,
    world: World | None = None,
) -> Validation | None:
    """Loss and BLEU with the weights that the model has; leaves it in the mode it was in. None if interrupted.

    `folder` is the run's: what it keeps of the training pairs decides here as in `translate`. The processes of a
    `world`, which all have these weights, share the work; all but the first get None.
    """

    def go_on(lines: int) -> None:
        if interruption.signal is not None:
            raise _InterruptedError

    begin, was_training = monotonic(), model.training
    model.eval()
    try:
        side = held_out(prepared, "valid").sample(recipe.training.validate_segments or len(prepared.valid))
        rows = _share(side, recipe, world)
        found = None
        with merged_in_place(model), suppress(_InterruptedError):  # merged, as `translate` has it
            nll = validation_loss(model, recipe, prepared, precision, world)
            translated = translate_lines(
                ModelEngine(model, recipe.decoding),
                prepared.tokenizers,
                side.lines(recipe.decoding, trained_on=TrainedOn.of([Run(folder)])).at(rows),
                on_progress=go_on,
            )
            found = [(row, each[0].text) for row, each in zip(rows, translated, strict=True)]
    finally:
        model.train(was_training)
    shares = [found] if world is None else world.gathered(found)  # also where a signal came, which all then learn
    done = [] if shares is None else [share for share in shares if share is not None]
    if shares is None or len(done) < len(shares):
        return None
    hypotheses = [text for _, text in sorted(each for share in done for each in share)]
    sources, references = side.sources, side.references
    bleu, *others = _scores(hypotheses, side, recipe)
    some = range(0, len(sources), max(len(sources) // 3, 1))[:3]
    shown = [Sample(sources[row], references[row], hypotheses[row]) for row in some]
    doubtful = doubt([bleu], hypotheses, [references])
    return Validation(
        nll,
        bleu.value,
        bleu.signature,
        doubtful,
        shown,
        monotonic() - begin,
        peak_bytes(precision.device),
        recipe.training.best_by,
        others[0] if others else None,
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
    translated = translate_lines(engine, prepared.tokenizers, side.lines(settings))
    _scores([each[0].text for each in translated], side, recipe)


def judged_by(recipe: Recipe) -> str:
    """Fingerprint of the settings of search and scores: validations by other ones do not compare."""
    settings: list[Any] = [
        recipe.decoding.model_dump(exclude={"batch_tokens"}),
        recipe.scoring.model_dump(exclude={"metrics"}),
    ]
    if recipe.training.best_by != "bleu":
        settings.append(recipe.training.best_by)
    if recipe.scoring.tokenize is None:  # what is installed may change
        settings += [installed_tokenizer(languages_of(each)[1]) for each in recipe.data.directions]
    return hashlib.sha256(json_text(settings, sort_keys=True).encode()).hexdigest()[:16]


def comparable(progress: Progress, recipe: Recipe, say: Say) -> Progress:
    """The place in training, without scores that were made by other settings than the recipe's, of which it tells."""
    judged = judged_by(recipe)
    if progress.best_score is not None and progress.judged_by != judged:
        say(
            "earlier validations used other settings of decoding or scoring, or another training.best_by, and are not "
            "comparable: the best checkpoint and patience start again"
        )
        progress = progress.without_scores()
    return replace(progress, judged_by=judged, best_by=recipe.training.best_by)


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
def validation_loss(
    model: Network, recipe: Recipe, prepared: Prepared, precision: Precision, world: World | None = None
) -> float:
    """Unsmoothed negative log-likelihood per target token of the validation side, segments too long left out.

    The processes of a `world` compute a part of the batches each, and all get the result.
    """
    side, device = prepared.valid, precision.device
    longest = min(model.longest_source, model.longest_target)
    halving = Halving(np.maximum(side.source.lengths, side.target.lengths) + 1)

    def part(rows: Sequence[int]) -> tuple[Tensor, int]:
        inputs = Inputs.of(make_batch(side, np.array(rows), longest), device)
        loss, _ = batch_loss(model, inputs, precision, smoothing=0.0)
        return loss.nll.sum(), loss.tokens

    total, tokens = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device), 0
    batches = plan(side, batch_tokens=recipe.training.batch_tokens, max_length=longest, seed=0, epoch=0)
    for number in range(len(batches)) if world is None else world.share(len(batches)):
        for nll, count in halving.run(part, batches[number].tolist()):
            total += nll
            tokens += count
    if world is not None:
        sums = torch.tensor([float(total), float(tokens)], dtype=torch.float64)
        world.sum(sums)
        return float(sums[0] / sums[1])
    return float(total) / tokens


def _share(side: HeldOut, recipe: Recipe, world: World | None) -> list[int]:
    """The rows of a side that this process translates; documents that are translated together stay whole."""
    if world is None:
        return list(range(len(side.sources)))
    documents = side.lines(recipe.decoding).documents
    if documents is None:
        return list(world.share(len(side.sources)))
    begins = [row for row in range(len(side.sources)) if row == 0 or documents.ids[row] != documents.ids[row - 1]]
    ends = [*begins[1:], len(side.sources)]
    return [row for place in world.share(len(begins)) for row in range(begins[place], ends[place])]
