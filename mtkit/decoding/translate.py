"""Translating lines of text: N lines in, N lines out, in order, whatever they hold."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mtkit.data.tokenizer import Tokenizer, Tokenizers
from mtkit.decoding.batches import Segment, make_batch, plan, with_end
from mtkit.decoding.beam import beam_search
from mtkit.decoding.device import decoding_with
from mtkit.decoding.greedy import greedy_search
from mtkit.decoding.sampling import sample
from mtkit.decoding.search import EOS, Hypotheses, Model
from mtkit.decoding.splitting import split
from mtkit.errors import MtkitError
from mtkit.recipe import DecodingSettings

SEARCHES = {"greedy": greedy_search, "beam": beam_search, "sample": sample}

OnProgress = Callable[[int], object]
"""Called with the number of lines that have just been translated, as the `update` of a progress bar wants it."""


@dataclass(frozen=True)
class Translation:
    """One translation of a line."""

    text: str
    """Without line ends; empty for a blank line."""
    score: float
    """What it is ranked by: log P / length^alpha, plus the coverage penalty; -inf where the search found nothing."""
    log_prob: float
    """The model's log-probability, the end of the segment included."""
    pieces: tuple[int, ...]
    """Target pieces, EOS included."""
    parts: int = 1
    """In how many parts the line was translated: above 1 it was too long for the model, 0 means it was blank."""


BLANK = Translation(text="", score=0.0, log_prob=0.0, pieces=(), parts=0)


def translate_lines(
    model: Model,
    tokenizers: Tokenizers,
    lines: Sequence[str],
    settings: DecodingSettings,
    *,
    dtype: torch.dtype | None = None,
    on_progress: OnProgress | None = None,
) -> list[list[Translation]]:
    """The translations of each line, best first: one, or `settings.n_best`.

    Blank lines never reach the model. Lines that are too long for it are cut at sentence ends, and the translations of
    the parts are joined by a space (`Translation.parts` tells). In float32 a line's result does not depend on others.
    `dtype` is the arithmetic of the matrix products; None stands for float32.

    Raises: MtkitError where the settings ask for a coverage penalty that the model cannot give.
    """
    check_coverage(model, settings)
    segments = list(segments_of(lines, tokenizers.source, model.longest_source))
    batches = plan([len(segment.pieces) for segment in segments], settings.batch_tokens, hypotheses_of(settings))
    results: list[list[list[Translation]]] = [[] for _ in lines]
    for segment in segments:
        results[segment.line].append([])
    if on_progress is not None:
        on_progress(sum(not parts for parts in results))
    with decoding_with(model, dtype) as device:
        for indices in batches:
            batch = make_batch([segments[index] for index in indices], model.longest_target, device)
            found = SEARCHES[settings.method](model, batch, settings)
            for index, translations in zip(indices, _texts(found, tokenizers.target, settings.n_best), strict=True):
                segment = segments[index]
                results[segment.line][segment.part] = translations
            if on_progress is not None:
                on_progress(sum(segments[index].part == 0 for index in indices))
    return [_line(parts, settings) for parts in results]


def check_coverage(model: Model, settings: DecodingSettings) -> None:
    """Raises: MtkitError where a coverage penalty is asked for and the model has no attention weights to base it on."""
    if settings.coverage_penalty and settings.method != "beam":
        raise MtkitError(
            f"decoding.coverage_penalty = {settings.coverage_penalty} ranks the hypotheses of beam search; "
            f"set it to 0 with method {settings.method}"
        )
    if settings.coverage_penalty and not model.has_weights:
        raise MtkitError(
            f"decoding.coverage_penalty = {settings.coverage_penalty} needs attention weights, and this model's cross "
            "attention mechanism has none; set it to 0, or train with a cross attention that has (cross: full)"
        )


def hypotheses_of(settings: DecodingSettings) -> int:
    """How many hypotheses of each segment the search keeps."""
    return {"greedy": 1, "beam": settings.beam, "sample": settings.n_best}[settings.method]


def segments_of(lines: Sequence[str], tokenizer: Tokenizer, longest: int | None) -> Iterator[Segment]:
    """What there is to translate: nothing for a blank line, parts of one longer than `longest` pieces, EOS counted."""

    def count(texts: Sequence[str]) -> list[int]:
        return [len(pieces) for pieces in tokenizer.encode_lines(texts)]

    encoded = tokenizer.encode_lines(lines)
    for number, (line, pieces) in enumerate(zip(lines, encoded, strict=True)):
        if not pieces or not line.strip():
            continue
        parts = [pieces]
        if longest is not None and len(pieces) >= longest:
            parts = tokenizer.encode_lines(split(line, longest - 1, count))
        for part, part_pieces in enumerate(filter(None, parts)):
            yield Segment(number, part, with_end(part_pieces, longest))


def _texts(found: Hypotheses, tokenizer: Tokenizer, n_best: int) -> Iterator[list[Translation]]:
    """The `n_best` translations of each segment of a batch."""
    pieces, lengths = found.pieces[:, :n_best].tolist(), found.lengths[:, :n_best].tolist()
    log_probs, scores = found.log_probs[:, :n_best].tolist(), found.scores[:, :n_best].tolist()
    for segment in zip(pieces, lengths, log_probs, scores, strict=True):
        yield [
            Translation(tokenizer.decode(ids[:length]), score, log_prob, tuple(ids[:length]))
            for ids, length, log_prob, score in zip(*segment, strict=True)
        ]


def _line(parts: list[list[Translation]], settings: DecodingSettings) -> list[Translation]:
    """The translations of a line from those of its parts."""
    if not parts:
        return [BLANK] * settings.n_best
    return (
        parts[0] if len(parts) == 1 else [_joined(each, settings.length_penalty) for each in zip(*parts, strict=True)]
    )


def _joined(parts: Sequence[Translation], alpha: float) -> Translation:
    """The translations of a line's parts as one; the score is that of the whole, coverage penalties added up."""
    pieces = (*(piece for part in parts for piece in part.pieces if piece != EOS), EOS)
    log_prob = sum(part.log_prob for part in parts)
    score = -math.inf
    if math.isfinite(log_prob):
        coverage = sum(part.score - part.log_prob / len(part.pieces) ** alpha for part in parts)
        score = log_prob / sum(len(part.pieces) for part in parts) ** alpha + coverage
    return Translation(" ".join(part.text for part in parts if part.text), score, log_prob, pieces, len(parts))
