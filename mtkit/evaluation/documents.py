"""Scores of documents: BLEU and chrF of joined lines, consistency of terms, and scores by position in the document.

Document BLEU (d-BLEU; Liu et al., "Multilingual Denoising Pre-training for Neural Machine Translation", TACL 2020; Bao
et al., "G-Transformer for Document-Level Machine Translation", ACL 2021) is BLEU with the lines of a document, joined
by spaces, as one segment. n-grams may cross lines, so that sentences may be cut in another way than the reference's.

Term consistency is the share, in per cent, of the pairs of occurrences of a source word in a document whose
translations are the same word, as LTCR (Lyu et al., "Encouraging Lexical Translation Consistency for Document-Level
Neural Machine Translation", EMNLP 2021). Words have no case and no punctuation, contain a letter, and are not among
the `FREQUENT` most frequent source words of the side, which are mostly function words. The translation of an occurrence
is the word that `mtkit.evaluation.word_links` links it to; occurrences without a link are left out.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.base import Score as SacrebleuScore

from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.metrics import CountedMetric, metric_names
from mtkit.evaluation.pictures.figures import save_figure
from mtkit.evaluation.scores import RESAMPLES, Score, with_intervals
from mtkit.evaluation.segment_scores import comet_models
from mtkit.evaluation.statistics import LengthRow, Statistics, gather, in_buckets
from mtkit.evaluation.systems import SystemTexts
from mtkit.evaluation.word_links import link_pairs, terms_of
from mtkit.terminal import ProgressBar, silent

METRICS = ("BLEU", "chrF")
"""Metrics of documents. TER's search for shifts takes too long on documents; exact and token match are of lines."""

CONSISTENCY = "consistency"

FREQUENT = 100
"""Number of most frequent source words that are no terms; a tenth of the different words if there are few."""

Rows = list[list[int]]
"""Line numbers of each document, from 0."""


@dataclass(frozen=True)
class PositionRow(LengthRow):
    """Scores of one system on lines `least` to `most` of the documents, counted from 1; `segments` are lines."""

    documents: int
    """Documents with such lines."""
    low: float | None
    """Lower end of the 95% interval of the first score, over documents; None if there is one document."""
    high: float | None


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

    A changed direction ends a document too. Blank lines that separate documents belong to none.

    Raises: DataError if there are neither ids nor blank lines.
    """
    lines = texts.references[0] if texts.sources is None else texts.sources
    if texts.documents is None and all(map(str.strip, lines)):
        raise DataError(
            f"{path} has no blank lines between documents, and the lines have no document ids; "
            "give a file with an id per line: --document-ids FILE"
        )
    blanks = np.cumsum([not line.strip() for line in lines]).tolist()
    ids = blanks if texts.documents is None else texts.documents
    directions = texts.directions or [""] * len(lines)
    if not any(map(str.strip, lines)):
        raise DataError(f"{path} has only blank lines; give text")
    in_documents = (row for row in range(len(lines)) if texts.documents is not None or lines[row].strip())
    return [list(rows) for _, rows in groupby(in_documents, key=lambda row: (ids[row], directions[row]))]


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


class Consistency(CountedMetric):
    """Term consistency as a sacrebleu metric. Statistics of a document: pairs with the same translation, all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refs = 0

    def _compute_score_from_stats(self, stats: Any) -> Any:
        return SacrebleuScore(CONSISTENCY, 100 * float(stats[0]) / float(stats[1]) if stats[1] else 0.0)


def consistency(
    sources: Sequence[str], translations: Sequence[Sequence[str]], documents: Rows, progress: ProgressBar = silent
) -> list[Statistics]:
    """Return the statistics of term consistency over documents for each list of translations of the source lines."""
    words = list(map(terms_of, sources))
    counts = Counter(chain.from_iterable(words))
    frequent = {word for word, _ in counts.most_common(min(FREQUENT, len(counts) // 10))}
    statistics = []
    for lines in translations:
        spoken = list(map(terms_of, lines))
        links = link_pairs(words, spoken, progress)
        rows = []
        for document in documents:
            translations_of: defaultdict[str, list[str]] = defaultdict(list)
            for row in document:
                for source, target in links[row]:
                    word = words[row][source]
                    if word not in frequent and any(map(str.isalpha, word)):
                        translations_of[word].append(spoken[row][target])
            lists = translations_of.values()
            same = sum(comb(count, 2) for words_of in lists for count in Counter(words_of).values())
            rows.append((same, sum(comb(len(words_of), 2) for words_of in lists)))
        kinds = np.zeros(len(rows), dtype=np.intp)
        statistics.append(Statistics(CONSISTENCY, [Consistency()], np.array(rows, dtype=np.float64), kinds))
    return statistics


def by_position(
    texts: SystemTexts,
    documents: Rows,
    metrics: Sequence[tuple[str, Sequence[Any]]],
    kinds: NDArray[np.intp],
    progress: ProgressBar = silent,
) -> list[list[PositionRow]]:
    """Return rows of scores by the number of the line in its document for each system, in buckets as `by_length`.

    `kinds` (lines,) are the indices of the lines' metrics. Intervals are over documents: bootstrap resamples of the
    documents that have lines in the bucket.
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


def draw_by_position(tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[PositionRow]]]], path: Path) -> None:
    """Draw the first score by position with its intervals as a PNG: a panel per side, a line per system.

    `tables` are the title of each side, the names of the systems and their rows.

    Raises: MtkitError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6 * len(tables)), layout="constrained")
    for axes, (title, names, systems) in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
        for number, (name, rows) in enumerate(zip(names, systems, strict=True)):
            metric = next(iter(rows[0].scores))
            values = [row.scores[metric] for row in rows]
            places = [place + 0.08 * (number - (len(names) - 1) / 2) for place in range(len(rows))]
            below = [np.nan if row.low is None else max(row.scores[metric] - row.low, 0.0) for row in rows]
            above = [np.nan if row.high is None else max(row.high - row.scores[metric], 0.0) for row in rows]
            axes.errorbar(
                places, values, yerr=[below, above], marker="o", markersize=4, capsize=3, linewidth=1.2, label=name
            )
        labels = [f"{row.name}\n{row.segments:,}\n{row.documents:,}" for row in systems[0]]
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("line in the document; below, the number of such lines, and of documents that have them")
        axes.set_ylabel(f"{metric}, 95% interval over documents")
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
