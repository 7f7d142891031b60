"""BLEU, chrF, TER and exact match, each with the signature that says how it was computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtkit.data.progress import Progress, silent
from mtkit.errors import DataError
from mtkit.evaluation.metrics import METRICS, make_metric, metric_names
from mtkit.evaluation.statistics import Statistics, gather, resample, seed

RESAMPLES = 1000


@dataclass(frozen=True)
class Score:
    """One metric over a whole corpus."""

    name: str
    """"BLEU", "chrF", "TER" or "exact"."""
    value: float
    signature: str
    """How it was computed, by which version: scores with different ones do not compare."""
    low: float | None = None
    """Lower end of the 95% bootstrap confidence interval, None where none was asked for."""
    high: float | None = None


def score_corpus(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    metrics: Sequence[str] = METRICS,
    bootstrap: int = RESAMPLES,
    tokenize: str | None = None,
    lowercase: bool = False,
    progress: Progress = silent,
) -> list[Score]:
    """The scores of hypotheses against one or several references for each segment, as the sacrebleu command gives them.

    `references` holds lists as long as `hypotheses`. `bootstrap` is the number of resamples (Koehn, 2004) for the
    confidence intervals, 0 for none; they are drawn from a fixed seed. `tokenize` names BLEU's tokenizer, 13a if left
    out. `lowercase` ignores case in BLEU, chrF and exact match; TER always does.

    Raises: DataError for unequal numbers of lines, or none; MtkitError for an unknown metric, and an unknown or missing
    tokenizer.
    """
    names = ["the hypothesis", *(f"reference {number + 1}" for number in range(len(references)))]
    check_counts(len(hypotheses), [len(each) for each in references], names)
    chosen = named_metrics(metrics, tokenize=tokenize, lowercase=lowercase)
    statistics = gather(chosen, hypotheses, references, progress=progress)
    return with_intervals([statistics], bootstrap, progress=progress)[0][0]


def named_metrics(
    names: Sequence[str], *, tokenize: str | None = None, lowercase: bool = False
) -> list[tuple[str, Any]]:
    """The metrics, for `gather`. Raises: MtkitError for an unknown one, and an unknown or missing tokenizer."""
    return [(name, make_metric(name, tokenize=tokenize, lowercase=lowercase)) for name in metric_names(names)]


def with_intervals(
    systems: Sequence[Sequence[Statistics]], bootstrap: int = RESAMPLES, *, progress: Progress = silent
) -> tuple[list[list[Score]], list[list[list[Any]]]]:
    """The scores of every system in every metric, and sacrebleu's scores of the resampled corpora behind the intervals.

    All systems have translated the same segments, and are scored on the same resamples.
    """
    if bootstrap < 2:
        return [[score_of(each) for each in system] for system in systems], []
    resampled = resample(systems, bootstrap, progress=progress)
    for statistics in (each for system in systems for each in system):
        statistics.metric.n_bootstrap, statistics.metric.seed = bootstrap, str(seed()).lower()
    scores = [
        [score_of(*each) for each in zip(system, samples, strict=True)]
        for system, samples in zip(systems, resampled, strict=True)
    ]
    return scores, resampled


def score_of(statistics: Statistics, resampled: Sequence[Any] = ()) -> Score:
    """The score of one system in one metric, with an interval where there are sacrebleu's scores of resamples."""
    result = statistics.result()
    low = high = None
    if resampled:
        result.estimate_ci(resampled)
        mean, margin = float(result._mean), float(result._ci)
        low, high = mean - margin, mean + margin
    return Score(statistics.name, float(result.score), statistics.metric.get_signature().format(), low, high)


def check_counts(hypotheses: int, references: Sequence[int], names: Sequence[str]) -> None:
    """Raises: DataError where the hypotheses, whose name is the first, and their references cannot belong together."""
    for name, count in zip(names[1:], references, strict=True):
        if count != hypotheses:
            raise DataError(
                f"{names[0]} has {hypotheses:,} lines and {name} has {count:,}; "
                "line N of one must translate line N of the other, so score what belongs together"
            )
    if not hypotheses or not references:
        raise DataError(f"{names[0]} has no lines: there is nothing to score")
