"""Scores by source length, which show how an attention mechanism handles long segments."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtkit.decoding.links.words import words
from mtkit.evaluation.statistics import Statistics

UPPER = (10, 20, 30, 40, 60)
"""Maximum words of each bucket; the last bucket has no maximum."""


@dataclass(frozen=True)
class LengthRow:
    """Scores of one system on the segments with `least` to `most` source words."""

    least: int
    most: int | None
    segments: int
    scores: dict[str, float]
    """Scores by metric, without intervals."""
    length_ratio: float | None
    """BLEU's length ratio: hypothesis tokens / reference tokens; None if the references have no tokens."""

    @property
    def name(self) -> str:
        """Name of the bucket, as `11-20` or `over 60`."""
        if self.most is None:
            return f"over {self.least - 1}"
        return f"{self.least}-{self.most}" if self.most > self.least else str(self.least)


def by_length(sources: Sequence[str], statistics: Sequence[Statistics], bleu: Statistics) -> list[LengthRow]:
    """Return a row for each bucket of UPPER that has segments; empty sources are a separate row.

    `statistics` belong to the metrics to show. `bleu` gives the length ratio. Words are counted by
    `mtkit.decoding.links.words`: words between spaces, or characters in scripts without spaces.
    """
    lengths = np.array([len(words(source)) for source in sources])
    rows = []
    for least, most in [(0, 0), *zip([1, *(each + 1 for each in UPPER)], [*UPPER, None], strict=True)]:
        in_bucket = lengths >= least if most is None else (lengths >= least) & (lengths <= most)
        if segments := int(in_bucket.sum()):
            scores = {each.name: float(each.result(in_bucket).score) for each in statistics}
            tokens = bleu.result(in_bucket)
            ratio = tokens.sys_len / tokens.ref_len if tokens.ref_len else None
            rows.append(LengthRow(least, most, segments, scores, ratio))
    return rows
