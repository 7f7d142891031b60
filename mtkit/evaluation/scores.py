"""Scores of corpora by metric, with signatures and confidence intervals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.metrics import ALL_METRICS, METRICS, make_metric, metric_names
from mtkit.evaluation.statistics import Statistics, gather, resample, seed
from mtkit.terminal import ProgressBar, silent
from mtkit.text.words import words

RESAMPLES = 1000

NORMAL = 1.959964
"""97.5% quantile of the standard normal distribution, for 95% intervals."""

NO_BLEU, SOME_CHRF = 0.5, 20.0
"""BLEU below NO_BLEU and chrF above SOME_CHRF: the tokenizer does not fit the text."""

SHORT_WORDS, SHORT = 4, 40
"""Words and characters below which most tokenizers find no 4-grams in a line, so that its BLEU is 0."""

MEAN = ("segments", "mean")
"""Key and value in the signature of a segment-score mean."""


def digits_of(signature: str) -> int:
    """Return the decimals of a score in tables: 2 for percentages, 4 for mean segment scores (COMET: 0 to 1)."""
    return 4 if ":".join(MEAN) in signature.split("|") else 2


@dataclass(frozen=True)
class Score:
    """One metric over a whole corpus."""

    name: str
    """"BLEU", "chrF", "TER", "exact" or "token"."""
    value: float
    signature: str
    """sacrebleu's signature: metric settings and version. Scores with different signatures are not comparable."""
    low: float | None = None
    """Lower end of the 95% confidence interval, or None without resamples.

    Exact match has Wilson's interval; the other metrics have the 2.5 and 97.5 percentiles of the resamples.
    """
    high: float | None = None
    """Upper end of the interval, or None."""

    @property
    def text(self) -> str:
        """The value, rounded for tables."""
        return f"{self.value:.{digits_of(self.signature)}f}"

    @property
    def interval(self) -> str:
        """The confidence interval, rounded for tables; empty without one."""
        digits = digits_of(self.signature)
        return "" if self.low is None or self.high is None else f"{self.low:.{digits}f} to {self.high:.{digits}f}"


def score_corpus(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    metrics: str | Iterable[str] = METRICS,
    bootstrap: int = RESAMPLES,
    tokenize: str | None = None,
    lowercase: bool = False,
    languages: Sequence[str] | None = None,
    progress: ProgressBar = silent,
) -> list[Score]:
    """Score hypotheses against one or several references per segment, with the results of the sacrebleu command.

    `references` holds lists as long as `hypotheses`. `bootstrap` is the number of resamples (Koehn, 2004) whose
    percentiles are the confidence intervals, 0 for no intervals; the seed is fixed. Exact match is a share of segments,
    so it has Wilson's interval. `languages` holds the target language of each segment, which selects the tokenizer of
    BLEU and TER; unknown languages use 13a. `tokenize` sets BLEU's tokenizer for all languages. `lowercase` ignores
    case in BLEU, chrF, exact and token match; TER always ignores it.

    Raises: DataError if the numbers of lines differ or are 0, or there are no references; MtkitError for no metric, an
    unknown metric, an unknown or missing tokenizer, and `bootstrap` = 1 or below 0.
    """
    if bootstrap == 1 or bootstrap < 0:
        raise MtkitError(f"bootstrap = {bootstrap} gives no interval; set {RESAMPLES}, or 0 for no intervals")
    names = ["the hypothesis", *(f"reference {number + 1}" for number in range(len(references)))]
    check_counts(len(hypotheses), [len(reference) for reference in references], names)
    several, kinds = distinct_languages(languages or [None] * len(hypotheses))
    chosen = named_metrics(metrics, several, tokenize=tokenize, lowercase=lowercase)
    statistics = gather(chosen, hypotheses, references, kinds=kinds, progress=progress)
    return with_intervals([statistics], bootstrap, progress=progress)[0][0]


def doubt(scores: Sequence[Score], hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> str | None:
    """Return a warning if BLEU is almost 0 although chrF is high and lines are long enough for 4-grams; else None."""
    bleu = next((score for score in scores if score.name == "BLEU"), None)
    if bleu is None or bleu.value >= NO_BLEU:
        return None
    # a long line of few words may be in a script without spaces that `words` does not split
    if all(len(words(line)) < SHORT_WORDS and len(line) < SHORT for line in hypotheses):
        return None
    (chrf,) = score_corpus(hypotheses, references, metrics=["chrF"], bootstrap=0)
    if chrf.value <= SOME_CHRF:
        return None
    tokenizer = bleu.signature.partition("|tok:")[2].partition("|")[0]
    return (
        f"BLEU {bleu.value:.2f} but chrF {chrf.value:.2f}: the tokenizer {tokenizer} does not seem to fit the "
        "target text; name the target language (--target-language of mtkit prepare and mtkit score), or the tokenizer "
        "(--tokenize, scoring.tokenize in a recipe), e.g. zh"
    )


def distinct_languages(languages: Sequence[str | None]) -> tuple[list[str | None], NDArray[np.intp]]:
    """Return the distinct languages, and for each segment the index (segments,) of its language."""
    places = {language: place for place, language in enumerate(dict.fromkeys(languages))}
    return list(places), np.array([places[language] for language in languages], dtype=np.intp)


def named_metrics(
    names: str | Iterable[str],
    languages: Sequence[str | None] = (None,),
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
) -> list[tuple[str, list[Any]]]:
    """Return names with a metric for each language, for `gather`.

    Raises: MtkitError for no name, an unknown name, and an unknown or missing tokenizer.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise MtkitError(f"no metrics; choose one or several of: {', '.join(ALL_METRICS)}")
    return [
        (name, [make_metric(name, language=language, tokenize=tokenize, lowercase=lowercase) for language in languages])
        for name in metric_names(names)
    ]


def with_intervals(
    systems: Sequence[Sequence[Statistics]], bootstrap: int = RESAMPLES, *, progress: ProgressBar = silent
) -> tuple[list[list[Score]], list[list[list[Any]]]]:
    """Return scores by system and metric, and sacrebleu's scores of the resampled corpora by system and metric.

    All systems have translated the same segments, and are scored on the same resamples. With less than 2 resamples,
    there are no intervals, and the second list is empty.
    """
    if bootstrap < 2:
        return [[score_of(statistics) for statistics in system] for system in systems], []
    resampled = resample(systems, bootstrap, progress=progress)
    for metric in (
        metric
        for system in systems
        for statistics in system
        if statistics.name != "exact"
        for metric in statistics.metrics
    ):
        metric.n_bootstrap, metric.seed = bootstrap, str(seed()).lower()
    scores = [
        [score_of(*statistics) for statistics in zip(system, samples, strict=True)]
        for system, samples in zip(systems, resampled, strict=True)
    ]
    return scores, resampled


def score_of(statistics: Statistics, resampled: Sequence[Any] = ()) -> Score:
    """Return the score of one system in one metric, with an interval if there are sacrebleu scores of resamples."""
    result = statistics.result()
    low = high = None
    if resampled and statistics.name == "exact":
        matches, segments = statistics.rows.sum(axis=0).tolist()
        low, high = wilson(matches, segments)
    elif resampled:
        low, high = percentiles([float(score.score) for score in resampled])
    return Score(statistics.name, float(result.score), statistics.signature(), low, high)


def percentiles(resampled: Sequence[float]) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentiles of the scores of resamples.

    They are sacrebleu's, but not centred at the mean: a skewed interval would leave the metric's range.
    """
    ordered = sorted(resampled)
    outside = len(ordered) // 40
    return ordered[outside], ordered[-1 - outside]


def wilson(matches: float, segments: float, quantile: float = NORMAL) -> tuple[float, float]:
    """Return the 95% confidence interval of the matching share of `segments`, in per cent (Wilson, 1927)."""
    share, spread = matches / segments, quantile**2 / segments
    middle = share + spread / 2
    margin = math.sqrt(spread * (share * (1 - share) + spread / 4))
    # rounding can leave the range from 0 to 100
    return max(100 * (middle - margin) / (1 + spread), 0.0), min(100 * (middle + margin) / (1 + spread), 100.0)


def check_counts(hypotheses: int, references: Sequence[int], names: Sequence[str]) -> None:
    """Check that each reference has as many lines as the hypotheses, whose name is first. Raises: DataError."""
    if not references:
        raise DataError(f"{names[0]} has no references; give one or several")
    for name, count in zip(names[1:], references, strict=True):
        if count != hypotheses:
            raise DataError(
                f"{names[0]} has {hypotheses:,} lines and {name} has {count:,}; "
                "line N of one must translate line N of the other; give files that match"
            )
    if not hypotheses:
        raise DataError(f"{names[0]} has no lines; give a file with translations")
