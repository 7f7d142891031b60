"""Translation of lines by an engine: N lines in, N lines out, in order, for any text."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from mtkit.decoding.contract import Engine, Hypotheses, SourceBatch
from mtkit.decoding.glossary import Glossary
from mtkit.decoding.lines.segments import Segment, Source, Window, split_lines
from mtkit.decoding.lines.source import SourceLines, TrainedOn
from mtkit.decoding.mbr import Metric, rank
from mtkit.decoding.parallel import map_batches
from mtkit.errors import DataError, MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.text.languages import seam
from mtkit.text.tokenizer import BREAK, EOS, PAD, UNK, Tokenizer, Tokenizers


def make_batch(
    segments: Sequence[Segment],
    limits: Sequence[int],
    device: torch.device,
    numbers: Sequence[int] | None = None,
    lines: list[list[int]] | None = None,
    stopped: Callable[[], bool] | None = None,
    glossary: Glossary | None = None,
) -> SourceBatch:
    """The padded segments on the device; `limits` are the maximum numbers of pieces of their translations.

    `numbers` are the numbers of the lines, as in `SourceLines`. `lines` and `stopped` become attributes of the batch.
    `glossary` is required if segments have terms.
    """
    terms = [segment.terms for segment in segments]
    of_segments = [segment.line if numbers is None else numbers[segment.line] for segment in segments]
    keys = [(line << 24) + segment.part for line, segment in zip(of_segments, segments, strict=True)]
    return SourceBatch(
        padded([segment.pieces for segment in segments], device),
        list(limits),
        torch.tensor(keys, device=device),
        tasks_of([segment.task for segment in segments], device),
        lines=lines,
        prefixes=[segment.prefix for segment in segments] if any(segment.prefix for segment in segments) else None,
        terms=glossary.of_batch(terms, device) if glossary is not None and any(terms) else None,
        stopped=stopped,
    )


def tasks_of(tasks: Sequence[int | None], device: torch.device) -> Tensor | None:
    """The task of each segment (B,) on the device; None for a model without tasks."""
    known = [task for task in tasks if task is not None]
    return torch.tensor(known, device=device) if known else None


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The sequences of pieces as (B, width of the longest), padded on the right, on the device."""
    rows = np.full((len(sequences), max(map(len, sequences))), PAD, dtype=np.int64)
    for row, pieces in zip(rows, sequences, strict=True):
        row[: len(pieces)] = pieces
    return torch.from_numpy(rows).to(device)


OnProgress = Callable[[int], object]
"""Called with the number of lines that have just been translated, like the `update` of a progress bar."""


@dataclass(frozen=True)
class Translation:
    """One translation of a line."""

    text: str
    """Without line ends; empty for a blank line."""
    score: float
    """The rank: log P / length^alpha, plus the coverage penalty, or the expected utility (`mtkit.decoding.mbr`); -inf
    if the search found nothing. If the line was translated together with others, the score and the log-probability are
    for all of them."""
    log_prob: float
    """The model's log-probability, end of segment included; with a lexicon, among the pieces of the shortlist."""
    pieces: tuple[int, ...]
    """Target pieces, EOS included."""
    parts: int = 1
    """The number of parts that the line was translated in: above 1 if it was longer than usual, 0 if blank."""
    together: int = 1
    """The number of lines, itself included, that were joined to be translated at once."""
    cut: bool = False
    """Whether it or one of its parts reached the maximum number of pieces, so that its end may be missing."""
    astray: bool = False
    """Whether the search lost its place among joined lines (`mtkit.decoding.search.endings`)."""
    fell_back: bool = False
    """Whether no joint translation with other lines separated into them, so the line was translated by itself."""
    cleaned: bool = False
    """Whether its line has control or invisible characters that were dropped or became spaces."""
    terms: int = 0
    """The number of glossary terms that it must contain."""
    missed: int = 0
    """The number of glossary terms that it lacks."""
    of_parts: tuple["Translation", ...] = ()
    """The translations of its parts, if there are several."""


BLANK = Translation(text="", score=0.0, log_prob=0.0, pieces=(), parts=0)


def translate_lines(
    engine: Engine,
    tokenizers: Tokenizers,
    lines: SourceLines | Sequence[str],
    *,
    on_progress: OnProgress = lambda lines: None,
    stopped: Callable[[], bool] | None = None,
) -> list[list[Translation]]:
    """The translations of each line, best first: one, or `n_best` of the engine's settings.

    Blank lines never reach the engine. A line too long for the engine, or longer than the lines it was `trained_on`, is
    split at sentence ends (see `mtkit.decoding.lines.splitting.split_sentences`), and the translations of its parts are
    joined as the target language joins sentences (`Translation.parts` is their number).

    The result of a line is independent of other lines if the hypotheses of the engine are independent of the batch.
    Lines of `documents` that are not split are the exception: they are translated together. If a joint translation does
    not separate into its lines, each half of them is translated, down to single lines (`Translation.fell_back`).

    Translations begin with the `prefixes` of the lines; if a line is too long for the engine, its first part does.

    `stopped`, called from any thread, returns whether the translations are no longer wanted.

    Raises: MtkitError for settings that the engine does not support, and for several translations of lines that are
    translated together, or prefixes of them; DataError for a prefix that the model cannot make; StoppedError if the
    translations are no longer wanted.
    """
    engine.check()
    lines, settings = SourceLines.of(lines), engine.settings
    if lines.glossary is not None and settings.method != "beam":
        raise MtkitError(f"a glossary needs beam search, and decoding.method = {settings.method}; set it to beam")
    if lines.documents is not None and (settings.n_best > 1 or lines.glossary is not None):
        reason = "a glossary" if lines.glossary is not None else f"decoding.n_best = {settings.n_best}"
        raise MtkitError(
            f"{reason} is for lines that are translated one by one; leave it out, or translate without documents "
            "(--sentences)"
        )
    prefixes = _encode_prefixes(lines, tokenizers.target, settings, engine.longest_target)
    source = Source(lines, tokenizers.source, engine.longest_source)
    batches = partial(_translate_segments, engine, tokenizers.target, lines, stopped)
    separate = partial(_separate, tokenizers.target, lines.trained_on, settings.max_pieces)
    done = {number: [BLANK] * settings.n_best for number, pieces in enumerate(source.encoded) if not pieces}
    on_progress(len(done))
    fallen: dict[int, int] = {}
    """Number of lines that were joined, by the number of each line whose joint translation did not separate."""
    with engine.ready() as device:
        place = attrgetter("place")
        for _, windows in groupby(sorted(source.windows(), key=place), place):  # each place is the next one's context
            translations = partial(batches, device=device)
            for window, joined, size in _translate_windows(source, [*windows], done, translations, separate):
                done |= {number: [line] for number, line in zip(window.lines, joined, strict=False)}
                fallen |= {} if joined else dict.fromkeys(window.lines, size)
                on_progress(len(joined))
        rest = [number for number in range(len(lines.lines)) if number not in done]
        segments = [
            segment if segment.part or prefixes is None else replace(segment, prefix=prefixes[segment.line])
            for segment in source.segments(rest)
        ]
        parts: dict[int, list[Translation]] = {}
        for batch in batches(segments, device):
            parts |= batch
            on_progress(sum(segments[index].part == 0 for index, _ in batch))
    parts_of_lines: dict[int, list[list[Translation]]] = {number: [] for number in rest}
    for index, segment in enumerate(segments):
        parts_of_lines[segment.line].append(parts[index])
    targets = lines.targets()
    for number in rest:
        done[number] = _join_parts(parts_of_lines[number], settings, seam(targets[number]))
        if number in fallen:
            done[number] = [replace(line, together=fallen[number], fell_back=True) for line in done[number]]
    for number, line in enumerate(lines.lines):
        if source.encoded[number] and tokenizers.source.cleans(line):
            done[number] = [replace(translation, cleaned=True) for translation in done[number]]
        if lines.glossary is not None:
            done[number] = [_with_terms(translation, line, lines.glossary) for translation in done[number]]
    return [done[number] for number in range(len(lines.lines))]


def _encode_prefixes(
    lines: SourceLines, tokenizer: Tokenizer, settings: DecodingSettings, longest: int | None
) -> list[tuple[int, ...]] | None:
    """The pieces of each line's prefix. Raises: MtkitError as `translate_lines`; DataError for a bad prefix."""
    if lines.prefixes is None:
        return None
    if lines.documents is not None or settings.no_repeat_ngram:
        other = "lines of documents are translated together (give --sentences)"
        if settings.no_repeat_ngram:
            other = f"decoding.no_repeat_ngram = {settings.no_repeat_ngram} (set it to 0)"
        raise MtkitError(f"translations cannot begin with given text if {other}")
    encoded = tokenizer.encode_lines(lines.prefixes)
    for number, pieces in enumerate(encoded):
        line = 1 + (number if lines.numbers is None else lines.numbers[number])
        if UNK in pieces:
            raise DataError(f"the prefix of line {line:,} has a character that the run's vocabulary does not have")
        if longest is not None and len(pieces) >= longest:
            raise DataError(
                f"the prefix of line {line:,} has {len(pieces):,} pieces, and a translation has at most {longest - 1:,}"
            )
    return list(map(tuple, encoded))


def _with_terms(translation: Translation, line: str, glossary: Glossary) -> Translation:
    terms, missed = glossary.count(line, translation.text)
    return replace(translation, terms=terms, missed=missed)


def _translate_windows(
    source: Source,
    windows: Sequence[Window],
    done: Mapping[int, Sequence[Translation]],
    translate: Callable[[Sequence[Segment]], Iterable[list[tuple[int, list[Translation]]]]],
    separate: Callable[[Segment, Translation], list[Translation]],
) -> Iterator[tuple[Window, list[Translation], int]]:
    """The windows that join several lines, each with the translations of its lines and the number of joined lines.

    There are no translations if the joint one did not separate; then the halves of the window follow.
    """
    while joined := [*_joined(source, windows, done)]:
        windows = []
        for batch in translate([segment for _, segment in joined]):
            for index, (joint, *_) in batch:
                window, segment = joined[index]
                separated = separate(segment, joint)
                windows += [] if separated else window.halves()
                yield window, separated[-len(window.lines) :], segment.pieces.count(BREAK) + 1


def _joined(
    source: Source, windows: Iterable[Window], done: Mapping[int, Sequence[Translation]]
) -> Iterator[tuple[Window, Segment]]:
    """The windows that join several lines, as segments that begin with the lines of the context that are `done`."""
    for window in windows:
        context = window.known(lambda number: done[number][0].pieces if number in done else ())
        if len(context) + len(window.lines) > 1:
            yield window, source.join_lines([*context, *window.lines], context.values())


def _translate_segments(
    engine: Engine,
    tokenizer: Tokenizer,
    lines: SourceLines,
    stopped: Callable[[], bool] | None,
    segments: Sequence[Segment],
    device: torch.device,
) -> Iterator[list[tuple[int, list[Translation]]]]:
    """Batch by batch, the indices of the segments, each with its `n_best` translations."""
    settings, targets = engine.settings, lines.targets()

    def translate(places: Sequence[int], indices: Sequence[int]) -> list[list[Translation]]:
        chosen = [segments[places[index]] for index in indices]
        of_lines = [lines.trained_on.limits(segment.pieces, segment.task, settings.max_pieces) for segment in chosen]
        limits = list(map(sum, of_lines))
        if lines.prefixes is not None:
            limits = [limit + len(segment.prefix) for limit, segment in zip(limits, chosen, strict=True)]
        limits = [min(limit, engine.longest_target or limit) for limit in limits]
        batch = make_batch(chosen, limits, device, lines.numbers, of_lines, stopped, lines.glossary)
        batch.check()
        if settings.mbr is None:
            return _texts(engine.translate(batch), limits, tokenizer, settings.n_best)
        candidates = _texts(engine.translate(batch), limits, tokenizer, settings.hypotheses)
        of_segments = [targets[segment.line] for segment in chosen]
        return [
            _rerank(translations, settings.mbr, language)[: settings.n_best]
            for translations, language in zip(candidates, of_segments, strict=True)
        ]

    # terms widen the beam of their batch, so other segments have batches of their own
    added = [sum(term.size for term in segment.terms) for segment in segments]
    for kind in (False, True):
        places = [place for place, size in enumerate(added) if bool(size) == kind]
        if places:
            for batch in map_batches(
                partial(translate, places),
                [len(segments[place].pieces) for place in places],
                settings.batch_tokens,
                device,
                hypotheses=settings.hypotheses + max(added[place] for place in places),
                most=engine.max_parallel,
            ):
                yield [(places[index], translations) for index, translations in batch]


def _texts(hypotheses: Hypotheses, limits: Sequence[int], tokenizer: Tokenizer, n_best: int) -> list[list[Translation]]:
    """The `n_best` translations of each segment in a batch."""
    astray = torch.zeros_like(hypotheses.scores) if hypotheses.astray is None else hypotheses.astray
    columns = (hypotheses.pieces, hypotheses.lengths, hypotheses.log_probs, hypotheses.scores, astray)
    return [
        [
            Translation(
                tokenizer.decode(ids[:length]),
                score,
                log_prob,
                tuple(ids[:length]),
                cut=length >= limit,
                astray=bool(lost),
            )
            for ids, length, log_prob, score, lost in zip(*segment, strict=True)
        ]
        for limit, *segment in zip(limits, *(column[:, :n_best].tolist() for column in columns), strict=True)
    ]


def _rerank(translations: Sequence[Translation], metric: Metric, language: str | None) -> list[Translation]:
    """The hypotheses of a segment in the order of their expected utilities, which become their scores.

    Hypotheses that do not exist, with a score of -inf, are compared with none, and come last.
    """
    known = [translation for translation in translations if math.isfinite(translation.score)]
    ranked = rank([translation.text for translation in known], metric, language)
    missing = [translation for translation in translations if not math.isfinite(translation.score)]
    return [*(replace(known[place], score=utility) for place, utility in ranked), *missing]


def _separate(
    tokenizer: Tokenizer, trained_on: TrainedOn, most: int | None, segment: Segment, joint: Translation
) -> list[Translation]:
    """The translation of each joined line; empty if the joint translation does not separate into them.

    `most` is the setting `max_pieces`. A cut translation is rejected, because the ends of its last lines are missing,
    and one that is astray, because its lines may translate other lines of the source.
    """
    limits = trained_on.limits(segment.pieces, segment.task, most)
    ended = math.isfinite(joint.score) and not joint.cut and not joint.astray
    parts = split_lines(tokenizer, joint.pieces, len(limits)) if ended else None
    return [
        replace(joint, text=text, pieces=pieces, together=len(limits), cut=len(pieces) >= limit)
        for (text, pieces), limit in zip(parts or (), limits, strict=False)
    ]


def _join_parts(parts: list[list[Translation]], settings: DecodingSettings, between: str) -> list[Translation]:
    """The translations of a line from its parts' translations, with `between` to separate sentences."""
    if not parts:
        return [BLANK] * settings.n_best
    if len(parts) == 1:
        return parts[0]
    joined = [_join_translations(ranked, settings, between) for ranked in zip(*parts, strict=True)]
    return sorted(joined, key=lambda translation: -translation.score)


def _join_translations(parts: Sequence[Translation], settings: DecodingSettings, between: str) -> Translation:
    """The translations of the parts as one: the score of all pieces, with the sum of the coverage penalties.

    Expected utilities (`DecodingSettings.mbr`) are averaged.
    """
    alpha = settings.length_penalty
    pieces = (*(piece for part in parts for piece in part.pieces if piece != EOS), EOS)
    log_prob = sum(part.log_prob for part in parts)
    score = -math.inf
    if math.isfinite(log_prob) and settings.mbr is not None:
        score = sum(part.score for part in parts) / len(parts)
    elif math.isfinite(log_prob):
        coverage = sum(part.score - part.log_prob / len(part.pieces) ** alpha for part in parts)
        score = log_prob / sum(len(part.pieces) for part in parts) ** alpha + coverage
    text = between.join(part.text for part in parts if part.text)
    cut = any(part.cut for part in parts)
    return Translation(text, score, log_prob, pieces, len(parts), cut=cut, of_parts=tuple(parts))
