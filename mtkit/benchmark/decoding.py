"""Benchmark of decoding speed, text to text: runs, arithmetics and programs in turns, with their translations."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median
from typing import Any, Protocol

import torch

from mtkit.benchmark.machine import decoding_operations
from mtkit.data.prepared import Prepared
from mtkit.decoding.engines.model_engine import ModelEngine, find_dtype
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.source import SourceLines, TrainedOn
from mtkit.decoding.parallel import Workers, usual_batch_tokens
from mtkit.decoding.translate import translate_lines
from mtkit.errors import MtkitError, first_line
from mtkit.evaluation.scores import score_corpus
from mtkit.evaluation.systems import system_names
from mtkit.model.network import Network
from mtkit.product_rate import Rate, arithmetic_of, product_rate
from mtkit.recipe import DecodingSettings, Recipe
from mtkit.runs import Run

REST = 0.3
"""Seconds between turns, so that the previous program's threads stop spinning."""

TRIAL_SHARE = 4
"""Batch sizes are tried on one in this many lines, if there are several sizes."""


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
    """Number of allowed translations of each source piece; 0 if all pieces are allowed."""

    def sizes(self, beam: int) -> Sequence[int]:
        """Return the batch sizes to choose from, in the decoder's unit."""

    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        """Translate N lines into N lines; greedily if `beam` is 1."""


class OwnDecoder:
    """mtkit's decoding, as in `mtkit translate`. Batch sizes are padded source pieces times hypotheses."""

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

        With a lexicon, only pieces on its shortlists are allowed.
        """
        self.dtype = find_dtype(arithmetic)
        self.arithmetic = "float32" if arithmetic == "auto" else arithmetic
        self.shortlist = 0 if lexicon is None else lexicon.each
        self._given = list(sizes) or ([settings.batch_tokens] if settings.batch_tokens else [])
        self._device = next(model.parameters()).device
        self._tokenizers, self._settings = run.tokenizers, settings
        workers = Workers.where_possible(self._device)
        self._engine = ModelEngine(model, settings, self.dtype, lexicon, workers)
        self._trained_on = TrainedOn.of([run])

    def sizes(self, beam: int) -> Sequence[int]:
        """Return the given sizes, the size in the run's settings, or the default of `mtkit translate`."""
        return self._given or [usual_batch_tokens(self._device, beam)]

    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        """Translate with the run's settings, except beam and batch size."""
        changes: dict[str, Any] = {"method": "beam" if beam > 1 else "greedy", "beam": beam, "batch_tokens": size}
        changes |= {"n_best": 1, "mbr": None, "samples": None}
        settings = DecodingSettings.model_validate(self._settings.model_dump() | changes)
        translations = translate_lines(
            self._engine.with_settings(settings), self._tokenizers, SourceLines(lines, trained_on=self._trained_on)
        )
        return [Decoded(best.text, len(best.pieces)) for best, *_ in translations]


def own_decoders(
    run: Run,
    model: Network,
    arithmetics: Sequence[str],
    sizes: Sequence[int] = (),
    lexicons: Sequence[Lexicon | None] = (None,),
) -> list[OwnDecoder]:
    """Make a decoder of the run in each arithmetic with each lexicon. Raises: as `OwnDecoder`."""
    settings = run.recipe.decoding
    return [
        OwnDecoder(run, model, settings, arithmetic, sizes, lexicon)
        for arithmetic in arithmetics
        for lexicon in lexicons
    ]


@dataclass(frozen=True)
class Candidate:
    """One run's model and its decoders."""

    run: Run
    model: Network
    decoders: Sequence[Decoder]


@dataclass
class Measured:
    """Results of one decoder at one beam."""

    run: str
    """The name of the run, as in `DecodingBenchmark.runs`."""
    program: str
    arithmetic: str
    shortlist: int
    beam: int
    size: int = 0
    """The batch size that was fastest, in the decoder's unit."""
    seconds: list[float] = field(default_factory=list)
    """Time of each repeat."""
    lines: int = 0
    pieces: int = 0
    texts: list[str] = field(default_factory=list)
    bleu: float = 0.0
    same: float = 0.0
    """Share of lines with the same translation as the run's first decoder at this beam."""

    @property
    def speed(self) -> float:
        """Mean segments per second of all repeats."""
        return self.lines * len(self.seconds) / sum(self.seconds)

    @property
    def median(self) -> float:
        """Segments per second of the median repeat."""
        return self.lines / median(self.seconds)

    @property
    def pieces_per_second(self) -> float:
        """Mean pieces of translations per second of all repeats."""
        return self.pieces * len(self.seconds) / sum(self.seconds)


@dataclass(frozen=True)
class DecodingBenchmark:
    """Results of all decoders."""

    runs: dict[str, Run]
    """{name: run}; names differ, also for folders of the same name in different places."""
    side: HeldOut
    device: torch.device
    repeats: int
    rates: dict[str, Rate]
    operations: dict[str, dict[int, float]]
    """{name of the run: {beam: necessary operations per segment}}."""
    signature: str
    """sacrebleu's signature of the BLEU scores."""
    rows: list[Measured]
    """Sorted by beam, then by run and decoder in the order of the arguments."""
    failed: list[tuple[Measured, str]]
    """Rows, without results, of decoders that failed at a beam, with the errors."""

    @property
    def beams(self) -> list[int]:
        """Beams in the order of the arguments."""
        return list(dict.fromkeys(row.beam for row in self.rows))

    def of_beam(self, beam: int) -> list[Measured]:
        """Return the rows of one beam."""
        return [row for row in self.rows if row.beam == beam]

    def ceiling(self, row: Measured) -> float | None:
        """Return the segments per second at which the necessary operations reach the machine's rate; None if unknown.

        Necessary operations include the logits of all pieces, so a row with a shortlist has no ceiling.
        """
        if row.shortlist:
            return None
        rate = self.rates.get(arithmetic_of(row.arithmetic))
        return None if rate is None else rate.best / self.operations[row.run][row.beam]

    def share(self, row: Measured) -> float | None:
        """Return the row's speed divided by its ceiling; None if unknown."""
        ceiling = self.ceiling(row)
        return None if ceiling is None else row.speed / ceiling


def common_side(prepared: Sequence[Prepared], name: str | None = None) -> HeldOut:
    """Return the side of that name, whose text must be the same in all data; by default the first side of the first.

    Raises: DataError for an unknown name; MtkitError if the text differs.
    """
    first = held_out(prepared[0], name)
    for other in prepared[1:]:
        side = held_out(other, first.name)
        if (side.sources, side.references) != (first.sources, first.references):
            raise MtkitError(
                f"the side {first.name} of {other.folder} and {prepared[0].folder} have different text; choose "
                "runs with the same text, or give prepared data for all of them with --data"
            )
    return first


def first_segments(side: HeldOut, count: int | None) -> HeldOut:
    """Return the first `count` segments of a side without documents; all for None."""
    return replace(side.at(range(len(side.sources))[:count]), documents=None)


def measure_decoding(
    candidates: Sequence[Candidate],
    side: HeldOut,
    beams: Sequence[int],
    *,
    repeats: int = 3,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> DecodingBenchmark:
    """Translate the side with each decoder of each run at each beam, in turns.

    The other decoders of a run must agree with its first one. All models are on one device. All translations are
    scored with the first run's settings. `on_progress` receives the number of finished repeats and of all repeats.

    If a decoder fails, the others continue. Raises: MtkitError if there is nothing to translate, or for an invalid
    beam; the error of a run's first decoder.
    """
    if not side.sources or not beams or min(beams) < 1 or repeats < 1:
        raise MtkitError("beams and repeats are whole numbers from 1, and there must be segments to translate")
    chosen = [candidate.run for candidate in candidates]
    runs = dict(zip(system_names(chosen), chosen, strict=True))
    decoders = [(name, decoder) for name, its in zip(runs, candidates, strict=True) for decoder in its.decoders]
    operations: dict[str, dict[int, float]] = {name: {} for name in runs}
    rows: list[Measured] = []
    failed: list[tuple[Measured, str]] = []
    for number, beam in enumerate(dict.fromkeys(beams)):
        at_beam = [
            (each, Measured(name, each.program, each.arithmetic, each.shortlist, beam, lines=len(side.sources)))
            for name, each in decoders
        ]
        for turn in range(1 + repeats):
            for decoder, row in list(at_beam):
                try:
                    if turn == 0:
                        row.size = _fastest_size(decoder, side.sources, beam)
                    else:
                        _translate(decoder, row, side.sources)
                except Exception as error:
                    if any(decoder is its.decoders[0] for its in candidates):
                        raise
                    at_beam.remove((decoder, row))
                    failed.append((row, f"{type(error).__name__}: {first_line(error)}"))
            on_progress(number * (1 + repeats) + 1 + turn, len(beams) * (1 + repeats))
        rows += [row for _, row in at_beam]
        for name, candidate in zip(runs, candidates, strict=True):
            first = next(row for _, row in at_beam if row.run == name)
            operations[name][beam] = _operations(candidate, side, first)
    signature = _score(candidates[0].run.recipe, side, rows)
    device = candidates[0].model.output_weight.device
    names = dict.fromkeys(["float32", *(arithmetic_of(row.arithmetic) for row in rows)])
    sizes = {size for run in runs.values() for size in (run.recipe.model.d_model, run.recipe.model.feed_forward)}
    measured = {name: product_rate(name, device, sorted(sizes)) for name in names}
    rates = {name: rate for name, rate in measured.items() if rate is not None}
    return DecodingBenchmark(runs, side, device, repeats, rates, operations, signature, rows, failed)


def _fastest_size(decoder: Decoder, lines: Sequence[str], beam: int) -> int:
    """Warm the decoder up on some lines, and return the batch size that is fastest on them."""
    trial = lines[:: TRIAL_SHARE if len(lines) >= 2 * TRIAL_SHARE else 1]
    sizes = decoder.sizes(beam)
    if len(sizes) == 1:
        decoder.translate(trial, beam, sizes[0])
        return sizes[0]
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _, size in product(range(2), sizes):
        times[size].append(_timed(decoder, trial, beam, size)[1])
    return min(times, key=lambda size: min(times[size]))


def _translate(decoder: Decoder, row: Measured, lines: Sequence[str]) -> None:
    time.sleep(REST)
    found, seconds = _timed(decoder, lines, row.beam, row.size)
    row.seconds.append(seconds)
    row.texts, row.pieces = [decoded.text for decoded in found], sum(decoded.pieces for decoded in found)


def _timed(decoder: Decoder, lines: Sequence[str], beam: int, size: int) -> tuple[list[Decoded], float]:
    """Return the translations and their time; text exists only after the device has finished."""
    begin = time.perf_counter()
    decoded = decoder.translate(lines, beam, size)
    return decoded, time.perf_counter() - begin


def _operations(candidate: Candidate, side: HeldOut, row: Measured) -> float:
    run, model = candidate.run, candidate.model
    sources, targets = (
        [len(pieces) + 1 for pieces in tokenizer.encode_lines(texts)]
        for tokenizer, texts in ((run.tokenizers.source, side.sources), (run.tokenizers.target, row.texts))
    )
    longest = (model.longest_source, model.longest_target)
    segments = [(min(s, longest[0]), min(t, longest[1])) for s, t in zip(sources, targets, strict=True)]
    return decoding_operations(model, segments, row.beam)


def _score(recipe: Recipe, side: HeldOut, rows: Sequence[Measured]) -> str:
    """Set BLEU and agreement of the rows; return the signature."""
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
    """Yield the first row of each row's run and beam."""
    first: dict[tuple[str, int], Measured] = {}
    for row in rows:
        yield first.setdefault((row.run, row.beam), row)
