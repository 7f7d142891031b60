"""Scores of lines by their number in the document."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtkit.evaluation.scores import RESAMPLES, with_intervals
from mtkit.evaluation.statistics import LengthRow, Statistics, gather, in_buckets
from mtkit.evaluation.systems import SystemTexts
from mtkit.terminal import ProgressBar, silent


@dataclass(frozen=True)
class PositionRow(LengthRow):
    """Scores of one system on lines `least` to `most` of the documents, counted from 1; `segments` are lines."""

    documents: int
    """Documents with such lines."""
    low: float | None
    """Lower end of the 95% interval of the first score, over documents; None if there is one document."""
    high: float | None


def by_position(
    texts: SystemTexts,
    documents: list[list[int]],
    metrics: Sequence[tuple[str, Sequence[Any]]],
    kinds: NDArray[np.intp],
    progress: ProgressBar = silent,
) -> list[list[PositionRow]]:
    """Return each system's scores by line number in the document, in buckets as `by_length`.

    `documents` are the line numbers of each document, from 0; `kinds` (lines,) are the indices of the lines' metrics.
    Intervals are over documents: bootstrap resamples of the documents that have lines in the bucket.
    """
    places = np.zeros(len(kinds), dtype=np.intp)
    numbers = np.zeros(len(kinds), dtype=np.intp)
    for number, rows in enumerate(documents):
        places[rows], numbers[rows] = np.arange(1, len(rows) + 1), number
    tables = []
    for hypotheses in texts.hypotheses:
        table = []
        lines = gather(metrics, hypotheses, texts.references, kinds=kinds, progress=progress)
        for least, most, members in in_buckets(places):
            if least == 0:
                continue  # lines between documents
            scores = {of_metric.name: float(of_metric.result(members).score) for of_metric in lines}
            bleu = next((of_metric.result(members) for of_metric in lines if of_metric.name == "BLEU"), None)
            by_document = _of_documents(lines[0].of(members), numbers[members])
            ratio = bleu.sys_len / bleu.ref_len if bleu and bleu.ref_len else None
            ((first,),), _ = with_intervals([[by_document]], RESAMPLES if len(by_document.rows) > 1 else 0)
            about = least, most, int(members.sum()), scores, ratio
            table.append(PositionRow(*about, len(by_document.rows), first.low, first.high))
        tables.append(table)
    return tables


def _of_documents(lines: Statistics, numbers: NDArray[np.intp]) -> Statistics:
    """Sum the statistics of lines by document (lines,)."""
    _, first, places = np.unique(numbers, return_index=True, return_inverse=True)
    rows = np.zeros((len(first), lines.rows.shape[1]))
    np.add.at(rows, places, lines.rows)
    return replace(lines, rows=rows, kinds=lines.kinds[first])
