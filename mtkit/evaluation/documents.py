"""Scores of documents: BLEU and chrF of joined lines, consistency of terms, and scores by position in the document.

Document BLEU (d-BLEU; Liu et al., "Multilingual Denoising Pre-training for Neural Machine Translation", TACL 2020; Bao
et al., "G-Transformer for Document-Level Machine Translation", ACL 2021) is BLEU with the lines of a document, joined
by spaces, as one segment. n-grams may cross lines, so that sentences may be cut in another way than the reference's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.document_positions import PositionRow, by_position
from mtkit.evaluation.metrics import metric_names
from mtkit.evaluation.scores import RESAMPLES, Score, with_intervals
from mtkit.evaluation.segment_scores import comet_models
from mtkit.evaluation.statistics import Statistics
from mtkit.evaluation.systems import SystemTexts
from mtkit.evaluation.term_consistency import consistency
from mtkit.terminal import ProgressBar, silent
from mtkit.text.characters import is_blank

METRICS = ("BLEU", "chrF")
"""Metrics of documents. TER's search for shifts takes too long on documents; exact and token match are of lines."""

Rows = list[list[int]]
"""Line numbers of each document, from 0."""


@dataclass(frozen=True)
class DocumentScores:
    """Scores that `score_side` adds to the scores of whole documents."""

    lines: int
    positions: list[list[PositionRow]]
    """Scores by position in the document for each system."""
    reference: Score | None
    """Term consistency of the first reference; None if the source is unknown or no term occurs twice."""
    pairs: list[int]
    """Pairs of occurrences that have translations, of the reference and of each system; empty without consistency."""


def document_metrics(asked: Sequence[str] | None, usual: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics asked for, or those usual ones that documents have. Raises: MtkitError for other metrics."""
    if asked and comet_models(asked)[1]:
        raise MtkitError("--metric comet scores lines, not --documents; leave one out")
    names = metric_names(asked or usual)
    if asked and (others := [name for name in names if name not in METRICS]):
        raise MtkitError(f"documents have no {others[0]}; choose one or both of: {', '.join(METRICS)}")
    return tuple(name for name in names if name in METRICS) or METRICS


def document_rows(texts: SystemTexts, path: Path) -> Rows:
    """Return the lines of each document: a changed id, or a blank line of the source or reference `path`, ends one.

    A changed direction ends a document too. Blank lines at its beginning and end belong to no document.

    Raises: DataError if there are neither ids nor blank lines.
    """
    lines = texts.references[0] if texts.sources is None else texts.sources
    blank = list(map(is_blank, lines))
    if texts.documents is None and not any(blank):
        raise DataError(
            f"{path} has no blank lines between documents, and the lines have no document ids; "
            "give a file with an id per line: --document-ids FILE"
        )
    if all(blank):
        raise DataError(f"{path} has only blank lines; give text")
    ids = np.cumsum(blank).tolist() if texts.documents is None else texts.documents
    directions = texts.directions or [""] * len(lines)
    documents = []
    for _, rows in groupby(range(len(lines)), key=lambda row: (ids[row], directions[row])):
        if with_text := [row for row in rows if not blank[row]]:
            documents.append(list(range(with_text[0], with_text[-1] + 1)))
    return documents


def joined(texts: SystemTexts, documents: Rows) -> SystemTexts:
    """Return texts with a segment per document, its lines joined by spaces."""

    def join(lines: Sequence[str]) -> list[str]:
        return [" ".join(lines[row] for row in rows) for rows in documents]

    return replace(
        texts,
        hypotheses=list(map(join, texts.hypotheses)),
        references=list(map(join, texts.references)),
        sources=None if texts.sources is None else join(texts.sources),
        directions=texts.directions and [texts.directions[rows[0]] for rows in documents],
        documents=None,
    )


def document_scores(
    lines: SystemTexts,
    documents: Rows,
    metrics: Sequence[tuple[str, Sequence[Any]]],
    kinds: NDArray[np.intp],
    progress: ProgressBar = silent,
) -> tuple[list[list[Statistics]], DocumentScores]:
    """Return the statistics of term consistency over documents for each system, if there are any, and other scores.

    `kinds` (lines,) are the indices of the lines' metrics, for `gather`.
    """
    reference, pairs, terms = None, list[int](), list[list[Statistics]]([] for _ in lines.hypotheses)
    if lines.sources is not None:
        texts = [lines.references[0], *lines.hypotheses]
        of_reference, *of_systems = statistics = consistency(lines.sources, texts, documents, progress)
        if of_reference.rows.any():
            terms = [[of_system] for of_system in of_systems]
            pairs = [int(of_texts.rows[:, 1].sum()) for of_texts in statistics]
            ((reference,),), _ = with_intervals([[of_reference]], RESAMPLES if len(documents) > 1 else 0)
    positions = by_position(lines, documents, metrics, kinds, progress)
    return terms, DocumentScores(sum(map(len, documents)), positions, reference, pairs)
