"""Scores by the length of the source: what an attention mechanism does to long segments shows here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtkit.decoding.links.words import words
from mtkit.evaluation.statistics import Statistics

UPPER = (10, 20, 30, 40, 60)
"""The most words of every bucket but the last, which has no end."""


@dataclass(frozen=True)
class LengthRow:
    """One system's scores on the segments whose sources have `least` to `most` words."""

    least: int
    most: int | None
    segments: int
    scores: dict[str, float]
    """By metric, without intervals."""
    length_ratio: float | None
    """BLEU's: tokens of the translations by those of the references; None where these have none."""

    @property
    def name(self) -> str:
        """`11-20`, or `over 60`."""
        if self.most is None:
            return f"over {self.least - 1}"
        return f"{self.least}-{self.most}" if self.most > self.least else str(self.least)


def by_length(sources: Sequence[str], statistics: Sequence[Statistics], bleu: Statistics) -> list[LengthRow]:
    """A row for every bucket of UPPER that has segments; empty sources, if any, are a row of their own.

    `statistics` are of the metrics to show and `bleu` those of BLEU, among them or not. Words are those of
    `mtkit.decoding.links.words`: what spaces divide, and the characters of scripts that have none between words.
    """
    lengths = np.array([len(words(source)) for source in sources])
    rows = []
    for least, most in [(0, 0), *zip([1, *(each + 1 for each in UPPER)], [*UPPER, None], strict=True)]:
        chosen = lengths >= least if most is None else (lengths >= least) & (lengths <= most)
        if segments := int(chosen.sum()):
            scores = {each.name: float(each.result(chosen).score) for each in statistics}
            tokens = bleu.result(chosen)
            ratio = tokens.sys_len / tokens.ref_len if tokens.ref_len else None
            rows.append(LengthRow(least, most, segments, scores, ratio))
    return rows
