"""Sufficient statistics of segments, and scores of resampled corpora, in bounded memory.

A corpus's BLEU, chrF, TER, exact and token match are functions of its segments' summed sufficient statistics.
sacrebleu's own resampling holds resamples x segments rows: 7 GB at 1,000 resamples of 100,000 segments. This module
draws in blocks, with the same seed and order, so that its results are equal to sacrebleu's.

Scores by source length, which show how an attention mechanism handles long segments.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtkit.errors import MtkitError, shown
from mtkit.terminal import ProgressBar, silent
from mtkit.text.words import words

Numbers = NDArray[np.float64]

SEGMENTS = 256
"""Segments per step of the progress bar."""

BLOCK = 1 << 21
"""Maximum draws in memory: indices (bootstrap) or bytes (randomisation, at least 32 per segment)."""

DRAWS = 256
"""Maximum draws per step of the progress bar."""

WORD = 32
"""A block's number of trials is a multiple of WORD: numpy draws booleans from 32-bit words."""


@dataclass(frozen=True)
class Statistics:
    """Sufficient statistics of one system's translations for one metric."""

    name: str
    metrics: Sequence[Any]
    """sacrebleu metrics, one per target language; their statistics can be summed."""
    rows: Numbers
    """Statistics (segments, numbers)."""
    kinds: NDArray[np.intp]
    """Index in `metrics` for each segment (segments,)."""

    @property
    def metric(self) -> Any:
        """The first segment's metric: all metrics compute scores in the same way."""
        return self.metrics[self.kinds[0]]

    def result(self, chosen: NDArray[np.bool_] | None = None) -> Any:
        """Return sacrebleu's score of all segments, or of the chosen ones (segments,); at least one segment."""
        rows = self.rows if chosen is None else self.rows[chosen]
        # cumsum adds in order, like sacrebleu
        return self.metric._compute_score_from_stats(rows.cumsum(axis=0)[-1].tolist())

    def of(self, chosen: NDArray[np.bool_]) -> "Statistics":
        """Return the statistics of the chosen segments (segments,)."""
        return Statistics(self.name, self.metrics, self.rows[chosen], self.kinds[chosen])

    def signature(self, **about: int | str | None) -> str:
        """Return sacrebleu's signature with `about` added; values that differ by language are joined, as tok:13a+zh."""
        first, *others = (self.metrics[kind].get_signature() for kind in dict.fromkeys(self.kinds.tolist()))
        for key, value in first.info.items():
            values = dict.fromkeys([value, *(other.info[key] for other in others)])
            if len(values) > 1:
                first.info[key] = "+".join(
                    {"True": "yes", "False": "no"}.get(str(value), str(value)) for value in values
                )
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
    """Compute the statistics of at least one segment for named metrics.

    `references` holds lists as long as `hypotheses`. `kinds` (segments,) is the index of each segment's metric in the
    list of a name; None means 0.
    """
    kinds = np.zeros(len(hypotheses), dtype=np.intp) if kinds is None else kinds
    order = np.argsort(kinds, kind="stable")
    cuts = np.flatnonzero(np.diff(kinds[order])) + 1
    blocks = [
        part[start : start + SEGMENTS] for part in np.split(order, cuts) for start in range(0, len(part), SEGMENTS)
    ]
    statistics = []
    for name, metrics_of_name in metrics:
        rows: list[Numbers] = []
        for block in progress(blocks, name, len(blocks)):
            # the sacrebleu command removes spaces at line ends too
            block_references = [[reference[line].rstrip() for line in block] for reference in references]
            stripped = [hypotheses[line].rstrip() for line in block]
            metric = metrics_of_name[kinds[block[0]]]
            rows.append(np.array(metric._extract_corpus_statistics(stripped, block_references), dtype=np.float64))
        in_order = np.concatenate(rows)
        in_order[order] = in_order.copy()
        statistics.append(Statistics(name, metrics_of_name, in_order, kinds))
    return statistics


def resample(
    systems: Sequence[Sequence[Statistics]], resamples: int, *, progress: ProgressBar = silent
) -> list[list[list[Any]]]:
    """Return sacrebleu's scores by system and metric on `resamples` corpora, drawn with replacement for all systems.

    The draws equal those in sacrebleu's bootstrap (Koehn, 2004). sacrebleu sums in single precision, which is exact up
    to 16.7 million; here all sums are exact.
    """
    scores: list[list[list[Any]]] = [[[] for _ in system] for system in systems]
    for counts in _draws(resamples, len(systems[0][0].rows), progress):
        for system, found in zip(systems, scores, strict=True):
            for statistics, results in zip(system, found, strict=True):
                results.extend(_scores_of(statistics, counts))
    return scores


def resampled_values(systems: Sequence[Statistics], resamples: int) -> Numbers:
    """Return the scores (systems, resamples) of `resample` for one metric as numbers, which take less memory."""
    values: list[list[float]] = [[] for _ in systems]
    for counts in _draws(resamples, len(systems[0].rows), silent):
        for statistics, results in zip(systems, values, strict=True):
            results.extend(score.score for score in _scores_of(statistics, counts))
    return np.array(values, dtype=np.float64)


def _draws(resamples: int, segments: int, progress: ProgressBar) -> Iterator[Numbers]:
    """Yield blocks of resamples: how often each segment was drawn (resamples, segments)."""
    generator = np.random.default_rng(seed())
    blocks = _blocks(resamples, segments, 1)
    for size in progress(blocks, "bootstrap", len(blocks)):
        drawn = generator.integers(0, segments, size=(size, segments))
        yield np.stack([np.bincount(indices, minlength=segments) for indices in drawn]).astype(np.float64)


def _scores_of(statistics: Statistics, counts: Numbers) -> list[Any]:
    """Return sacrebleu's scores of a block of resamples."""
    sums = (counts @ statistics.rows).astype(np.float32)
    return [statistics.metric._compute_score_from_stats(row) for row in sums]


def shuffle(
    baseline: Sequence[Statistics],
    systems: Sequence[Sequence[Statistics]],
    trials: int,
    *,
    progress: ProgressBar = silent,
) -> list[list[Numbers]]:
    """Return score differences to the baseline when each segment's translations are swapped at random.

    These are, by system and metric, the absolute differences (trials,). The draws equal those in sacrebleu's
    approximate randomisation (Riezler and Maxwell, 2005).
    """
    segments = len(baseline[0].rows)
    generator = np.random.default_rng(seed())
    scores: list[list[list[float]]] = [[[] for _ in system] for system in systems]
    # a trial moves the summed differences of the swapped segments from one system to the other
    gaps = [[base.rows - compared.rows for base, compared in zip(baseline, system, strict=True)] for system in systems]
    sums = [[of_metric.rows.sum(axis=0) for of_metric in system] for system in (baseline, *systems)]
    blocks = _blocks(trials, segments, WORD)
    for size in progress(blocks, "randomisation", len(blocks)):
        swapped = generator.integers(2, size=(size, segments), dtype=np.bool_)
        for system, distances in enumerate(scores):
            for number, statistics in enumerate(baseline):
                moved = _picked_sums(swapped, gaps[system][number])
                system_sums, base_sums = sums[system + 1][number] + moved, sums[0][number] - moved
                compute = statistics.metric._compute_score_from_stats
                distances[number] += [
                    abs(compute(a).score - compute(b).score)
                    for a, b in zip(system_sums.tolist(), base_sums.tolist(), strict=True)
                ]
    return [[np.array(values) for values in system] for system in scores]


def seed() -> int | None:
    """Return sacrebleu's seed: SACREBLEU_SEED, or 12345; None if it is "none".

    Raises: MtkitError if it is not a non-negative integer.
    """
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    if seed.lower() == "none":
        return None
    if not (seed.isascii() and seed.isdigit()):
        raise MtkitError(f"SACREBLEU_SEED={shown(seed)} is not a non-negative integer; set one, or the word none")
    return int(seed)


def _picked_sums(picked: NDArray[np.bool_], rows: Numbers) -> Numbers:
    """Return the sums (trials, numbers) of the picked rows; `picked` is (trials, segments)."""
    step = max(BLOCK // len(picked), 1)
    starts = range(0, len(rows), step)
    return np.sum(
        [picked[:, start : start + step].astype(np.float64) @ rows[start : start + step] for start in starts], 0
    )


def _blocks(times: int, segments: int, multiple: int) -> list[int]:
    """Return the number of draws in each block."""
    size = max(min(BLOCK // segments, DRAWS) // multiple, 1) * multiple
    return [min(size, times - begin) for begin in range(0, times, size)]


UPPER = (10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960)
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

    `statistics` belong to the metrics to show. `bleu` gives the length ratio. `mtkit.text.words` counts words: between
    spaces, or characters in scripts without spaces.
    """
    rows = []
    for least, most, in_bucket in in_buckets(np.array([len(words(source)) for source in sources])):
        scores = {statistic.name: float(statistic.result(in_bucket).score) for statistic in statistics}
        tokens = bleu.result(in_bucket)
        ratio = tokens.sys_len / tokens.ref_len if tokens.ref_len else None
        rows.append(LengthRow(least, most, int(in_bucket.sum()), scores, ratio))
    return rows


def in_buckets(numbers: NDArray[np.intp]) -> Iterator[tuple[int, int | None, NDArray[np.bool_]]]:
    """Yield least, most and members of each bucket of UPPER that has members; 0 has a bucket of its own."""
    for least, most in [(0, 0), *zip([1, *(upper + 1 for upper in UPPER)], [*UPPER, None], strict=True)]:
        members = numbers >= least if most is None else (numbers >= least) & (numbers <= most)
        if members.any():
            yield least, most, members
