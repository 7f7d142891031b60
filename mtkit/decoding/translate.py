"""Batches of source segments of similar length.

Translation of lines of text: N lines in, N lines out, in order, for any text.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mtkit.decoding.contract import Engine, Hypotheses, SourceBatch
from mtkit.decoding.lines.source import Directions, Documents, Segment, Source, TrainedOn, join_lines, split_lines
from mtkit.decoding.parallel import at_once, parallel_map
from mtkit.errors import MtkitError
from mtkit.memory import Halving
from mtkit.recipe import DecodingSettings
from mtkit.text.languages import seam
from mtkit.text.tokenizer import EOS, PAD, Tokenizer, Tokenizers

LEAST = 512
"""Padded pieces below which batches are not made smaller for the sake of evenness."""


def plan(lengths: Sequence[int], batch_tokens: int, hypotheses: int, at_once: int = 1) -> list[list[int]]:
    """Indices of the segments of each batch, longest first, so that memory runs out in the first batch or never.

    A batch holds at most `batch_tokens` padded source pieces, each counted once per hypothesis, or one segment. If
    several batches are computed `at_once`, the number of batches is raised to a multiple of this number, with batches
    as small as that allows, so that all end at about the same time.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()

    def filled(limit: int) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0
        for index in order:
            if room < 1:
                batches.append([])
                room = max(1, limit // (hypotheses * lengths[index]))
            batches[-1].append(index)
            room -= 1
        return batches

    batches = filled(batch_tokens)
    if at_once > 1:
        count = -(-len(batches) // at_once) * at_once
        least = min(LEAST, batch_tokens)
        batches = filled(bisect_left(range(batch_tokens), True, least, key=lambda limit: len(filled(limit)) <= count))
    return batches


def make_batch(
    segments: Sequence[Segment],
    limits: Sequence[int],
    device: torch.device,
    numbers: Sequence[int] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> SourceBatch:
    """The segments, padded, on the device, with the maximum number of pieces of each translation.

    `numbers` are those of the lines among all, from 0; None: their indices. `stopped` is that of the batch.
    """
    source = padded([segment.pieces for segment in segments], device)
    lines = [segment.line if numbers is None else numbers[segment.line] for segment in segments]
    keys = torch.tensor(
        [(line << 24) + segment.part for line, segment in zip(lines, segments, strict=True)], device=device
    )
    tasks = tasks_of([segment.task for segment in segments], device)
    return SourceBatch(source, list(limits), keys, tasks, stopped=stopped)


def tasks_of(tasks: Sequence[int | None], device: torch.device) -> Tensor | None:
    """The task of each segment (B,) on the device; None for a model without tasks."""
    known = [task for task in tasks if task is not None]
    return torch.tensor(known, device=device) if known else None


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The sequences of pieces as (B, width of the longest), PAD behind the others, on the device."""
    rows = np.full((len(sequences), max(map(len, sequences))), PAD, dtype=np.int64)
    for row, pieces in zip(rows, sequences, strict=True):
        row[: len(pieces)] = pieces
    return torch.from_numpy(rows).to(device)


OnProgress = Callable[[int], object]
"""Called with the number of lines that have just been translated, as the `update` of a progress bar wants it."""


@dataclass(frozen=True)
class Translation:
    """One translation of a line."""

    text: str
    """Without line ends; empty for a blank line."""
    score: float
    """What it is ranked by: log P / length^alpha, plus the coverage penalty; -inf where the search found nothing.
    Of a line that was translated together with others, here and below, that of all of them."""
    log_prob: float
    """The model's log-probability, the end of the segment included; with a lexicon, among the pieces that may come."""
    pieces: tuple[int, ...]
    """Target pieces, EOS included."""
    parts: int = 1
    """In how many parts the line was translated: above 1 it held more than is usual, 0 means it was blank."""
    together: int = 1
    """How many lines of its document were joined, this one among them, to be translated at once."""
    cut: bool = False
    """Whether it, or a part of it, has as many pieces as it may have, so that its end may be missing."""
    fell_back: bool = False
    """Whether that translation did not come apart into as many lines, so that this line was translated alone."""
    cleaned: bool = False
    """Whether its line has control or invisible characters that were dropped or became spaces."""
    of_parts: tuple["Translation", ...] = ()
    """Those of its parts, where there are several."""


BLANK = Translation(text="", score=0.0, log_prob=0.0, pieces=(), parts=0)


def translate_lines(
    engine: Engine,
    tokenizers: Tokenizers,
    lines: Sequence[str],
    *,
    directions: Directions | None = None,
    documents: Documents | None = None,
    trained_on: TrainedOn | None = None,
    numbers: Sequence[int] | None = None,
    on_progress: OnProgress | None = None,
    stopped: Callable[[], bool] | None = None,
) -> list[list[Translation]]:
    """The translations of each line, best first: one, or `n_best` of the engine's settings.

    Blank lines never reach the engine. A line too long for the engine, or longer than the lines it was `trained_on`, is
    split at sentence ends (the rule is in `mtkit.decoding.lines.splitting.parted`). The translations of its parts are
    joined by what stands between sentences of the target language (`Translation.parts` gives their number).
    `trained_on` also limits the length of a translation.

    The result of a line is independent of other lines if the hypotheses of the engine are independent of the batch.
    Lines of `documents` are the exception: they are translated together, but for those that are split. Where a joint
    translation does not separate into as many lines, each line is translated alone (`Translation.fell_back`).

    `directions` are required for a model trained on several. `numbers` are those of the lines among all that are
    translated, from 0, which seed sampling; None: the lines are all. `stopped`, called from any thread, returns whether
    the translations are no longer wanted.

    Raises: MtkitError for settings that the engine does not support, and for several translations of lines that are
    translated together; StoppedError if the translations are no longer wanted.
    """
    engine.check()
    settings = engine.settings
    if documents is not None and settings.n_best > 1:
        raise MtkitError(
            f"decoding.n_best = {settings.n_best} is for lines that are translated one by one; "
            "set it to 1, or translate without documents (--sentences)"
        )
    trained_on = trained_on or TrainedOn()
    numbers = range(len(lines)) if numbers is None else numbers
    work = _Work(engine, tokenizers.target, trained_on, numbers, on_progress or (lambda lines: None), stopped)
    source = Source(tokenizers.source, engine.longest_source, directions, trained_on)
    encoded = source.encode(lines)
    groups = [] if documents is None else list(documents.groups(source, source.whole(lines, encoded)))
    found = {number: [BLANK] * settings.n_best for number, pieces in enumerate(encoded) if not pieces}
    work.on_progress(len(found))
    with engine.ready() as device:
        found |= work.together(source, encoded, groups, device)
        rest = [number for number in range(len(lines)) if number not in found]
        alone = work.alone(list(source.segments(lines, encoded, rest)), device)
    seams = [" "] * len(lines)
    if directions is not None:
        seams = [seam(language) for language in directions.targets_of_lines()]
    sizes = {number: len(group) for group in groups for number in group}
    for number in rest:
        whole = _line(alone.get(number, []), settings, seams[number])
        if number in sizes:
            whole = [replace(each, together=sizes[number], fell_back=True) for each in whole]
        found[number] = whole
    for number, line in enumerate(lines):
        if encoded[number] and tokenizers.source.cleans(line):
            found[number] = [replace(each, cleaned=True) for each in found[number]]
    return [found[number] for number in range(len(lines))]


def hypotheses_of(settings: DecodingSettings) -> int:
    """The number of hypotheses that the search keeps per segment."""
    return {"greedy": 1, "beam": settings.beam, "sample": settings.n_best}[settings.method]


@dataclass(frozen=True)
class _Work:
    """The arguments common to all batches, and the work on them."""

    engine: Engine
    tokenizer: Tokenizer
    trained_on: TrainedOn
    numbers: Sequence[int]
    on_progress: OnProgress
    stopped: Callable[[], bool] | None

    def batches(
        self, segments: Sequence[Segment], device: torch.device
    ) -> Iterator[list[tuple[int, list[Translation]]]]:
        """Batch by batch, the indices of its segments and the `n_best` translations of each."""
        lengths, settings = [len(segment.pieces) for segment in segments], self.engine.settings

        def translated(indices: Sequence[int]) -> list[tuple[int, list[Translation]]]:
            chosen = [segments[index] for index in indices]
            limits = [self._limit(each) for each in chosen]
            batch = make_batch(chosen, limits, device, self.numbers, self.stopped)
            batch.check()
            found = self.engine.translate(batch)
            return list(zip(indices, _texts(found, batch.limits, self.tokenizer, settings.n_best), strict=True))

        most = self.engine.max_parallel
        plans = plan(lengths, settings.batch_tokens, hypotheses_of(settings), at_once(device, most=most))
        for parts in parallel_map(partial(Halving(lengths).run, translated), plans, device, most):
            yield from parts

    def _limit(self, segment: Segment) -> int:
        most = self.engine.settings.max_pieces
        return self.trained_on.limit(segment.pieces, segment.task, self.engine.longest_target, most)

    def alone(self, segments: Sequence[Segment], device: torch.device) -> dict[int, list[list[Translation]]]:
        """The translations of the parts of each line, each line by itself, in order."""
        found: dict[int, list[Translation]] = {}
        for batch in self.batches(segments, device):
            found |= batch
            self.on_progress(sum(segments[index].part == 0 for index, _ in batch))
        lines: dict[int, list[list[Translation]]] = {}
        for index, segment in enumerate(segments):
            lines.setdefault(segment.line, []).append(found[index])
        return lines

    def together(
        self, source: Source, encoded: Sequence[list[int]], groups: Sequence[Sequence[int]], device: torch.device
    ) -> dict[int, list[Translation]]:
        """The translations of lines in groups whose joint translation separates into as many lines."""
        found: dict[int, list[Translation]] = {}
        for batch in self.batches([join_lines(source, encoded, group) for group in groups], device):
            lines = {
                number: [each]
                for index, (whole, *_) in batch
                for number, each in zip(groups[index], _apart(whole, self.tokenizer, len(groups[index])), strict=False)
            }
            found |= lines
            self.on_progress(len(lines))
        return found


def _apart(whole: Translation, tokenizer: Tokenizer, lines: int) -> list[Translation]:
    """The translation of each of the joined lines; None where it does not separate into as many.

    A cut translation is rejected, because the end of its last line is missing or it repeats itself.
    """
    ended = math.isfinite(whole.score) and not whole.cut
    parts = split_lines(tokenizer, whole.pieces, lines) if ended else None
    return [replace(whole, text=text, pieces=pieces, together=lines) for text, pieces in parts or ()]


def _texts(found: Hypotheses, limits: Sequence[int], tokenizer: Tokenizer, n_best: int) -> Iterator[list[Translation]]:
    """The `n_best` translations of each segment of a batch."""
    pieces, lengths = found.pieces[:, :n_best].tolist(), found.lengths[:, :n_best].tolist()
    log_probs, scores = found.log_probs[:, :n_best].tolist(), found.scores[:, :n_best].tolist()
    for limit, *segment in zip(limits, pieces, lengths, log_probs, scores, strict=True):
        yield [
            Translation(tokenizer.decode(ids[:length]), score, log_prob, tuple(ids[:length]), cut=length >= limit)
            for ids, length, log_prob, score in zip(*segment, strict=True)
        ]


def _line(parts: list[list[Translation]], settings: DecodingSettings, between: str) -> list[Translation]:
    """The translations of a line from those of its parts, `between` them what separates sentences."""
    if not parts:
        return [BLANK] * settings.n_best
    if len(parts) == 1:
        return parts[0]
    whole = [_joined(each, settings.length_penalty, between) for each in zip(*parts, strict=True)]
    return sorted(whole, key=lambda each: -each.score)


def _joined(parts: Sequence[Translation], alpha: float, between: str) -> Translation:
    """The translations of the parts of a line as one, with the score of the whole and the sum of coverage penalties."""
    pieces = (*(piece for part in parts for piece in part.pieces if piece != EOS), EOS)
    log_prob = sum(part.log_prob for part in parts)
    score = -math.inf
    if math.isfinite(log_prob):
        coverage = sum(part.score - part.log_prob / len(part.pieces) ** alpha for part in parts)
        score = log_prob / sum(len(part.pieces) for part in parts) ** alpha + coverage
    text = between.join(part.text for part in parts if part.text)
    cut = any(part.cut for part in parts)
    return Translation(text, score, log_prob, pieces, len(parts), cut=cut, of_parts=tuple(parts))
