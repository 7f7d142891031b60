"""What a metric must know of every segment, and the scores of resampled corpora, in bounded memory.

BLEU, chrF, TER and exact match of a corpus follow from the sum of one row of numbers a segment (sufficient
statistics). sacrebleu's own resampling holds resamples x segments of such rows, 7 GB at 1,000 resamples of 100,000
segments. Here they are drawn in blocks, from the same seed and in the same order, so that the results are sacrebleu's.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtkit.data.progress import ProgressBar, silent

Numbers = NDArray[np.float64]

SEGMENTS = 256
"""Segments between two signs of progress."""

BLOCK = 1 << 21
"""Draws held at a time: indices, or single bytes of which there are at least 32 a segment."""

DRAWS = 256
"""Draws between two signs of progress, at most."""

WORD = 32
"""Trials in a block are a multiple of it: numpy draws booleans from words of 32 bits."""


@dataclass(frozen=True)
class Statistics:
    """One metric's sufficient statistics of one system's translations."""

    name: str
    metrics: Sequence[Any]
    """sacrebleu's `Metric`, one for each language that is cut in a way of its own; their statistics add up."""
    rows: Numbers
    """(segments, numbers)."""
    kinds: NDArray[np.intp]
    """(segments,): which of the metrics the row of each segment is of."""

    @property
    def metric(self) -> Any:
        """The one of them that the first segment is of: all compute scores alike."""
        return self.metrics[self.kinds[0]]

    def result(self, chosen: NDArray[np.bool_] | None = None) -> Any:
        """sacrebleu's score of all segments, or of those chosen; at least one."""
        rows = self.rows if chosen is None else self.rows[chosen]
        # added up in order, as sacrebleu does
        return self.metric._compute_score_from_stats(rows.cumsum(axis=0)[-1].tolist())

    def of(self, chosen: NDArray[np.bool_]) -> "Statistics":
        """Those of the chosen segments."""
        return Statistics(self.name, self.metrics, self.rows[chosen], self.kinds[chosen])

    def signature(self, **about: int | str | None) -> str:
        """sacrebleu's signature with `about` in it; where languages differ in one of its values, as tok:13a+zh."""
        first, *others = (self.metrics[kind].get_signature() for kind in dict.fromkeys(self.kinds.tolist()))
        for key, value in first.info.items():
            values = dict.fromkeys([value, *(other.info[key] for other in others)])
            if len(values) > 1:
                first.info[key] = "+".join({"True": "yes", "False": "no"}.get(str(each), str(each)) for each in values)
        for key, value in about.items():
            first.update(key, value)
        return str(first.format())


def gather(
    metrics: Sequence[tuple[str, Sequence[Any]]],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    kinds: NDArray[np.intp] | None = None,
    progress: ProgressBar = silent,
) -> list[Statistics]:
    """The statistics for named metrics, of at least one segment. `references` holds lists as long as `hypotheses`.

    `kinds` (segments,) says which metric of each name's is for which segment; None stands for the first.
    """
    kinds = np.zeros(len(hypotheses), dtype=np.intp) if kinds is None else kinds
    order = np.argsort(kinds, kind="stable")
    cuts = np.flatnonzero(np.diff(kinds[order])) + 1
    blocks = [
        part[start : start + SEGMENTS] for part in np.split(order, cuts) for start in range(0, len(part), SEGMENTS)
    ]
    found = []
    for name, ways in metrics:
        rows: list[Numbers] = []
        for block in progress(blocks, name, len(blocks)):
            # the sacrebleu command drops spaces at the ends of lines too
            given = [[each[line].rstrip() for line in block] for each in references]
            stripped = [hypotheses[line].rstrip() for line in block]
            metric = ways[kinds[block[0]]]
            rows.append(np.array(metric._extract_corpus_statistics(stripped, given), dtype=np.float64))
        in_order = np.concatenate(rows)
        in_order[order] = in_order.copy()
        found.append(Statistics(name, ways, in_order, kinds))
    return found


def resample(
    systems: Sequence[Sequence[Statistics]], resamples: int, *, progress: ProgressBar = silent
) -> list[list[list[Any]]]:
    """sacrebleu's scores of every system in every metric, on the same `resamples` corpora drawn with replacement.

    The draws are those of sacrebleu's bootstrap (Koehn, 2004), which sums in single precision: so sums are exact here,
    and there up to 16.7 million.
    """
    segments = len(systems[0][0].rows)
    generator = np.random.default_rng(seed())
    scores: list[list[list[Any]]] = [[[] for _ in system] for system in systems]
    blocks = _blocks(resamples, segments, 1)
    for size in progress(blocks, "bootstrap", len(blocks)):
        drawn = generator.integers(0, segments, size=(size, segments))
        counts = np.stack([np.bincount(each, minlength=segments) for each in drawn]).astype(np.float64)
        for system, found in zip(systems, scores, strict=True):
            for statistics, results in zip(system, found, strict=True):
                sums = (counts @ statistics.rows).astype(np.float32)
                results += [statistics.metric._compute_score_from_stats(each) for each in sums]
    return scores


def shuffle(
    baseline: Sequence[Statistics],
    systems: Sequence[Sequence[Statistics]],
    trials: int,
    *,
    progress: ProgressBar = silent,
) -> list[list[Numbers]]:
    """How far two systems are apart when each segment's translations are swapped between them by chance.

    For every system but the baseline, in every metric, the absolute differences of `trials` trials: the draws are those
    of sacrebleu's approximate randomisation (Riezler and Maxwell, 2005).
    """
    segments = len(baseline[0].rows)
    generator = np.random.default_rng(seed())
    found: list[list[list[float]]] = [[[] for _ in system] for system in systems]
    # a trial moves the sum of the swapped segments' differences from one system to the other
    gaps = [[one.rows - other.rows for one, other in zip(baseline, system, strict=True)] for system in systems]
    sums = [[each.rows.sum(axis=0) for each in system] for system in (baseline, *systems)]
    blocks = _blocks(trials, segments, WORD)
    for size in progress(blocks, "randomisation", len(blocks)):
        swapped = generator.integers(2, size=(size, segments), dtype=np.bool_)
        for system, distances in enumerate(found):
            for number, statistics in enumerate(baseline):
                moved = _picked_sums(swapped, gaps[system][number])
                one, other = sums[system + 1][number] + moved, sums[0][number] - moved
                compute = statistics.metric._compute_score_from_stats
                distances[number] += [
                    abs(compute(a).score - compute(b).score) for a, b in zip(one.tolist(), other.tolist(), strict=True)
                ]
    return [[np.array(each) for each in system] for system in found]


def seed() -> int | None:
    """sacrebleu's seed: 12345, or what the environment says."""
    given = os.environ.get("SACREBLEU_SEED", "12345")
    return None if given.lower() == "none" else int(given)


def _picked_sums(picked: NDArray[np.bool_], rows: Numbers) -> Numbers:
    """The sums of the rows picked, (trials, numbers)."""
    step = max(BLOCK // len(picked), 1)
    starts = range(0, len(rows), step)
    return np.sum(
        [picked[:, start : start + step].astype(np.float64) @ rows[start : start + step] for start in starts], 0
    )


def _blocks(times: int, segments: int, multiple: int) -> list[int]:
    """How many of all draws come in each block."""
    size = max(min(BLOCK // segments, DRAWS) // multiple, 1) * multiple
    return [min(size, times - begin) for begin in range(0, times, size)]
