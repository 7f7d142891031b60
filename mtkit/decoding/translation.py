"""The translation of a line, joined from the translations of its parts if there are several."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import EOS

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


def join_parts(parts: list[list[Translation]], settings: DecodingSettings, between: str) -> list[Translation]:
    """Join the ranked translations of a line's parts into translations of the line; `between` separates sentences.

    Without parts, the line is blank.
    """
    if not parts:
        return [BLANK] * settings.n_best
    if len(parts) == 1:
        return parts[0]
    joined = [_join_translations(ranked, settings, between) for ranked in zip(*parts, strict=True)]
    return sorted(joined, key=lambda translation: -translation.score)


def _join_translations(parts: Sequence[Translation], settings: DecodingSettings, between: str) -> Translation:
    """Join one translation of each part: the score of all pieces, with the sum of the coverage penalties.

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
