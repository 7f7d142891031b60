"""BLEU, chrF and TER by sacrebleu, each with the signature that says how it was computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER

from mtkit.data.readers import Lines
from mtkit.errors import DataError, MtkitError, did_you_mean

METRICS = ("BLEU", "chrF", "TER")
"""TER counts edits: lower is better."""

RESAMPLES = 1000


@dataclass(frozen=True)
class Score:
    """One metric over a whole corpus."""

    name: str
    """"BLEU", "chrF" or "TER"."""
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
) -> list[Score]:
    """The scores of hypotheses against one or several references for each segment, as the sacrebleu command gives them.

    `references` holds lists as long as `hypotheses`. `bootstrap` is the number of resamples (Koehn, 2004) for the
    confidence intervals, 0 for none; they are drawn from a fixed seed. `tokenize` names BLEU's tokenizer, 13a if left
    out. `lowercase` ignores case in BLEU and chrF; TER always does.

    Raises: DataError for unequal numbers of lines, or none; MtkitError for an unknown or missing tokenizer.
    """
    names = ["the hypothesis", *(f"reference {number + 1}" for number in range(len(references)))]
    _check_counts(len(hypotheses), [len(each) for each in references], names)
    # the sacrebleu command drops spaces at the ends of lines too
    stripped = [line.rstrip() for line in hypotheses]
    given = [[line.rstrip() for line in each] for each in references]
    scores = []
    for name in metrics:
        metric = _metric(name, tokenize, lowercase)
        result = metric.corpus_score(stripped, given, n_bootstrap=max(bootstrap, 1))
        low = high = None
        if bootstrap > 1:
            mean, margin = float(result._mean), float(result._ci)
            low, high = mean - margin, mean + margin
        scores.append(Score(name, float(result.score), metric.get_signature().format(), low, high))
    return scores


def score_files(
    hypothesis: Path, references: Sequence[Path], *, tokenize: str | None = None, lowercase: bool = False
) -> list[Score]:
    """All scores of a file of hypotheses against one or several files of references, one segment a line.

    Raises: DataError for files that cannot be read, and unequal numbers of lines; MtkitError as `score_corpus`.
    """
    hypotheses = list(Lines(hypothesis))
    texts = [list(Lines(each)) for each in references]
    _check_counts(len(hypotheses), [len(each) for each in texts], [str(each) for each in (hypothesis, *references)])
    return score_corpus(hypotheses, texts, tokenize=tokenize, lowercase=lowercase)


def _check_counts(hypotheses: int, references: Sequence[int], names: Sequence[str]) -> None:
    for name, count in zip(names[1:], references, strict=True):
        if count != hypotheses:
            raise DataError(
                f"{names[0]} has {hypotheses:,} lines and {name} has {count:,}; "
                "line N of one must translate line N of the other, so score what belongs together"
            )
    if not hypotheses or not references:
        raise DataError(f"{names[0]} has no lines: there is nothing to score")


class _ChrF(CHRF):  # type: ignore[misc]
    """chrF whose interval can be computed where a resample has no match at all.

    sacrebleu 2.6 scores such a resample by a plain float and the others by numpy's, and fails to average them.
    """

    def _compute_score_from_stats(self, stats: Any) -> Any:
        result = super()._compute_score_from_stats(stats)
        if isinstance(stats, np.ndarray) and result.score == 0:
            result.score = stats[0] * 0.0
        return result


def _metric(name: str, tokenize: str | None, lowercase: bool) -> Any:
    if name == "chrF":
        return _ChrF(lowercase=lowercase)
    if name == "TER":
        return TER()
    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        known = sorted(BLEU.TOKENIZERS)
        hint = did_you_mean(tokenize, known)
        raise MtkitError(f"no tokenizer '{tokenize}'{hint}; sacrebleu has: {', '.join(known)}")
    try:
        return BLEU(tokenize=tokenize, lowercase=lowercase)
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MtkitError(f"sacrebleu cannot use the tokenizer '{tokenize}' here: {reason}") from error
