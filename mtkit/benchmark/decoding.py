"""How fast decoding is, text to text: arithmetics and programs with one model, in turns, with what each translates."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Protocol

import torch

from mtkit.benchmark.machine import Rate, arithmetic_of, product_rate
from mtkit.benchmark.operations import decoding_operations
from mtkit.decoding.engines.arithmetic import find_dtype
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.held_out import HeldOut
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.limits import TrainedOn
from mtkit.decoding.translate import translate_lines
from mtkit.errors import MtkitError
from mtkit.evaluation.scores import score_corpus
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings, Recipe
from mtkit.runs import Run

REST = 0.3
"""Seconds between turns, in which the threads of the program before go to sleep."""

TRIAL_SHARE = 4
"""Batch sizes are tried on one in so many lines, where there are several."""


@dataclass(frozen=True)
class Decoded:
    """One line's translation."""

    text: str
    pieces: int
    """Pieces of the translation, including the end mark."""


class Decoder(Protocol):
    """One program with the run's model in one arithmetic."""

    program: str
    arithmetic: str
    shortlist: int
    """Translations of each source piece that may come; 0 where all pieces may."""
    sizes: Sequence[int]
    """Batch sizes to choose from, in a unit of its own."""

    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        """From text to text, greedily where `beam` is 1; N lines in, N lines out."""


class OwnDecoder:
    """mtkit's own decoding, as `mtkit translate` does it. Batch sizes are padded source pieces, hypotheses counted."""

    program = "mtkit"

    def __init__(
        self,
        run: Run,
        model: Network,
        settings: DecodingSettings,
        arithmetic: str,
        sizes: Sequence[int] = (),
        lexicon: Lexicon | None = None,
    ) -> None:
        """`arithmetic` is a dtype of `mtkit translate`; auto is float32. Raises: MtkitError.

        With a lexicon, only pieces on its shortlists may come.
        """
        self.dtype = find_dtype(arithmetic)
        self.arithmetic = "float32" if arithmetic == "auto" else arithmetic
        self.shortlist = 0 if lexicon is None else lexicon.each
        self._lexicon = lexicon
        self.sizes: Sequence[int] = list(sizes) or [settings.batch_tokens]
        self._model, self._tokenizers, self._settings = model, run.tokenizers, settings
        self._trained_on = TrainedOn.of([run])

    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        """With the run's own settings but for beam and batch size."""
        changes = {"method": "beam" if beam > 1 else "greedy", "beam": beam, "batch_tokens": size, "n_best": 1}
        settings = DecodingSettings.model_validate(self._settings.model_dump() | changes)
        engine = ModelEngine(self._model, settings, self.dtype, self._lexicon)
        found = translate_lines(engine, self._tokenizers, lines, trained_on=self._trained_on)
        return [Decoded(best.text, len(best.pieces)) for best, *_ in found]


@dataclass
class Measured:
    """What one decoder came to at one beam."""

    program: str
    arithmetic: str
    shortlist: int
    beam: int
    size: int = 0
    """The batch size that was fastest, in the decoder's unit."""
    seconds: list[float] = field(default_factory=list)
    """Of each time that all lines were translated."""
    lines: int = 0
    pieces: int = 0
    texts: list[str] = field(default_factory=list)
    bleu: float = 0.0
    same: float = 0.0
    """Share of the lines that mtkit's first arithmetic translates alike at this beam."""

    @property
    def speed(self) -> float:
        """Segments per second, over all repeats."""
        return self.lines * len(self.seconds) / sum(self.seconds)

    @property
    def median(self) -> float:
        """Segments per second, of the median repeat."""
        return self.lines / median(self.seconds)

    @property
    def pieces_per_second(self) -> float:
        """Pieces of translations per second, over all repeats."""
        return self.pieces * len(self.seconds) / sum(self.seconds)


@dataclass(frozen=True)
class DecodingBenchmark:
    """All that was measured in one run."""

    run: Run
    side: HeldOut
    device: torch.device
    repeats: int
    rates: dict[str, Rate]
    operations: dict[int, float]
    """{beam: operations that a segment cannot do without}."""
    signature: str
    """sacrebleu's signature of the BLEU scores."""
    rows: list[Measured]

    def ceiling(self, row: Measured) -> float | None:
        """Segments a second at which the necessary operations alone take the machine's rate; None where not known.

        What is necessary is counted over all pieces, so a shortlist has none.
        """
        if row.shortlist:
            return None
        rate = self.rates.get(arithmetic_of(row.arithmetic))
        return None if rate is None else rate.best / self.operations[row.beam]

    def share(self, row: Measured) -> float | None:
        """The share of that ceiling which is reached."""
        ceiling = self.ceiling(row)
        return None if ceiling is None else row.speed / ceiling


def first_segments(side: HeldOut, count: int | None) -> HeldOut:
    """The first so many segments of a side, each on its own; all for None."""
    return HeldOut(side.name, side.sources[:count], side.references[:count])


def measure_decoding(
    run: Run,
    model: Network,
    side: HeldOut,
    decoders: Sequence[Decoder],
    beams: Sequence[int],
    *,
    repeats: int = 3,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> DecodingBenchmark:
    """Translate the side with each at each beam, in turns. The first decoder is what the others must agree with.

    `on_progress` is told how many of how many times the side was translated.

    Raises: MtkitError where there is nothing to translate, or a beam is none.
    """
    if not side.sources or not beams or min(beams) < 1 or repeats < 1:
        raise MtkitError("beams and repeats are whole numbers from 1, and there must be segments to translate")
    rows, operations = [], {}
    for number, beam in enumerate(dict.fromkeys(beams)):
        at_beam = [
            Measured(each.program, each.arithmetic, each.shortlist, beam, lines=len(side.sources)) for each in decoders
        ]
        total = len(beams) * (1 + repeats)
        for decoder, row in zip(decoders, at_beam, strict=True):
            row.size = _fastest_size(decoder, side.sources, beam)
        on_progress(number * (1 + repeats) + 1, total)
        for turn in range(repeats):
            for decoder, row in zip(decoders, at_beam, strict=True):
                _translate(decoder, row, side.sources)
            on_progress(number * (1 + repeats) + 2 + turn, total)
        operations[beam] = _operations(run, model, side, at_beam[0], beam)
        rows += at_beam
    signature = _score(run.recipe, side, rows)
    device = model.output_weight.device
    names = dict.fromkeys(["float32", *(arithmetic_of(each.arithmetic) for each in decoders)])
    sizes = (run.recipe.model.d_model, run.recipe.model.feed_forward)
    measured = {name: product_rate(name, device, sizes) for name in names}
    rates = {name: rate for name, rate in measured.items() if rate is not None}
    return DecodingBenchmark(run, side, device, repeats, rates, operations, signature, rows)


def _fastest_size(decoder: Decoder, lines: Sequence[str], beam: int) -> int:
    """Warms the decoder up on some of the lines, and chooses among its batch sizes by the time they take there."""
    trial = lines[:: TRIAL_SHARE if len(lines) >= 2 * TRIAL_SHARE else 1]
    if len(decoder.sizes) == 1:
        decoder.translate(trial, beam, decoder.sizes[0])
        return decoder.sizes[0]
    times: dict[int, list[float]] = {size: [] for size in decoder.sizes}
    for _, size in product(range(2), decoder.sizes):
        times[size].append(_timed(decoder, trial, beam, size)[1])
    return min(times, key=lambda size: min(times[size]))


def _translate(decoder: Decoder, row: Measured, lines: Sequence[str]) -> None:
    time.sleep(REST)
    found, seconds = _timed(decoder, lines, row.beam, row.size)
    row.seconds.append(seconds)
    row.texts, row.pieces = [each.text for each in found], sum(each.pieces for each in found)


def _timed(decoder: Decoder, lines: Sequence[str], beam: int, size: int) -> tuple[list[Decoded], float]:
    """Text comes back only when the device is done, so that nothing is left to wait for."""
    begin = time.perf_counter()
    found = decoder.translate(lines, beam, size)
    return found, time.perf_counter() - begin


def _operations(run: Run, model: Network, side: HeldOut, row: Measured, beam: int) -> float:
    sources, targets = (
        [len(pieces) + 1 for pieces in tokenizer.encode_lines(texts)]
        for tokenizer, texts in ((run.tokenizers.source, side.sources), (run.tokenizers.target, row.texts))
    )
    longest = (model.longest_source, model.longest_target)
    segments = [(min(s, longest[0]), min(t, longest[1])) for s, t in zip(sources, targets, strict=True)]
    return decoding_operations(model, segments, beam)


def _score(recipe: Recipe, side: HeldOut, rows: Sequence[Measured]) -> str:
    """Fills in BLEU and agreement; gives the signature."""
    signature = ""
    for row, first in zip(rows, _firsts(rows), strict=True):
        (bleu,) = score_corpus(
            row.texts,
            [side.references],
            metrics=("BLEU",),
            bootstrap=0,
            tokenize=recipe.scoring.tokenize,
            lowercase=recipe.scoring.lowercase,
            languages=side.target_languages,
        )
        row.bleu, signature = bleu.value, bleu.signature
        row.same = sum(a == b for a, b in zip(row.texts, first.texts, strict=True)) / len(row.texts)
    return signature


def _firsts(rows: Sequence[Measured]) -> Iterator[Measured]:
    """For each row the first one of its beam."""
    first: dict[int, Measured] = {}
    for row in rows:
        yield first.setdefault(row.beam, row)
