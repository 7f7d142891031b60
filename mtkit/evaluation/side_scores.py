"""Scores of one side for `mtkit score`: by system, direction and source length, with differences and notes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mtkit.evaluation.document_positions import PositionRow
from mtkit.evaluation.documents import DocumentScores, document_rows, document_scores, joined
from mtkit.evaluation.metrics import METRICS, missing_tokenizer
from mtkit.evaluation.scores import RESAMPLES, distinct_languages, doubt, named_metrics
from mtkit.evaluation.segment_scores import added_scores, check_names, comet_command, comet_models
from mtkit.evaluation.significance import TESTS, Comparison, compare_systems
from mtkit.evaluation.statistics import LengthRow, Statistics, by_length, gather
from mtkit.evaluation.systems import SystemTexts, Translated, read_texts
from mtkit.terminal import ProgressBar, silent
from mtkit.text.languages import (
    bleu_tokenizer,
    lacks_spaces,
    language_of,
    languages_of,
    script_language,
)

TOKENISED = 0.5
"""A text looks tokenised if a larger share of its lines ends in " ."."""


@dataclass(frozen=True)
class SideScores:
    """Scores of all systems on one side; the first system is the baseline."""

    name: str | None
    """Name of the side; None for files without a run."""
    files: list[Translated]
    segments: int
    """Number of segments; with `documents`, each document is one."""
    overall: Comparison
    directions: dict[str, tuple[int, Comparison]]
    """Segments and scores by direction; empty if there is only one direction."""
    lengths: list[list[LengthRow]]
    """Scores by source length for each system; empty if not requested."""
    notes: list[str]
    """Warnings: tokenised text, or a tokenizer that is not installed or does not seem to fit the text."""
    documents: DocumentScores | None = None
    """Other scores of documents; None if the segments are lines."""

    @property
    def by_position(self) -> tuple[str, list[str], list[list[PositionRow]]]:
        """The side's name, its systems and their scores by position in the document, for a picture."""
        return self.name or "", [file.system for file in self.files], self.documents.positions if self.documents else []


def score_side(
    name: str | None,
    files: Sequence[Translated],
    *,
    metrics: Sequence[str] = METRICS,
    tests: Sequence[str] = TESTS,
    lengths: bool = False,
    documents: bool = False,
    language: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    segment_scores: Mapping[str, Sequence[Path]] | None = None,
    progress: ProgressBar = silent,
) -> SideScores:
    """Score a side's translations; `lengths` adds scores by source length, which require the sources.

    `documents` scores whole documents instead of lines, adds scores by position in the document and, if the source is
    known, the consistency of terms (`mtkit.evaluation.term_consistency`). The metrics are then BLEU, chrF or both.

    `language` is the target language of all segments. With None, it is taken from the file of directions, or if there
    is none, from the name or the script of the first reference (`mtkit.text.languages.language_of`).

    `segment_scores` adds metrics by name, with a file of segment scores per system; `metrics` may then be empty. The
    metric comet, or comet:MODEL, has the scores of `comet-score`, which require the sources
    (`mtkit.evaluation.segment_scores`).

    Raises: DataError and MtkitError as `read_texts`, `named_metrics`, `compare_systems`, `read_segment_scores`,
    `check_names` and `run_comet` do.
    """
    metrics, comet = comet_models(metrics)
    options: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase}
    if metrics or not (segment_scores or comet):
        named_metrics(metrics, **options)  # raises for unknown names before files are read
    if comet:
        check_names(segment_scores or {}, comet)
        comet_command()
    lines = read_texts(files, sources=lengths or bool(comet), documents=documents)
    of_lines, note = _target_languages(files[0].references[0], lines, language)
    languages, kinds_of_lines = distinct_languages(of_lines)
    texts, kinds, rows_of_documents = lines, kinds_of_lines, list[list[int]]()
    if documents:
        rows_of_documents = document_rows(lines, files[0].source or files[0].references[0])
        first_lines = [rows[0] for rows in rows_of_documents]
        texts, kinds = joined(lines, rows_of_documents), kinds_of_lines[first_lines]
    chosen = named_metrics(metrics, languages, **options) if metrics else []
    systems = [
        gather(chosen, hypothesis, texts.references, kinds=kinds, progress=progress) for hypothesis in texts.hypotheses
    ]
    added = added_scores(files, texts, segment_scores or {}, comet)
    systems = [[*system, *more] for system, more in zip(systems, added, strict=True)]
    of_documents = None
    if documents:
        systems = [[replace(metric, name=f"d-{metric.name}") for metric in system] for system in systems]
        terms, of_documents = document_scores(lines, rows_of_documents, chosen, kinds_of_lines, progress)
        systems = [[*system, *more] for system, more in zip(systems, terms, strict=True)]
    length_rows = []
    if lengths:
        bleu = named_metrics(["BLEU"], languages, **options)
        length_rows = _by_length(texts, systems, bleu, kinds, progress)
    segments = len(texts.hypotheses[0])
    resamples = _resamples(segments, documents)
    overall = compare_systems(systems, tests=tests, resamples=resamples, progress=progress)
    names = {name for name, _ in chosen}
    has_bleu = "BLEU" in names
    if "TER" not in names and (tokenize is not None or not (has_bleu or lengths)):
        note = None  # nothing depends on the language
    notes = [note, missing_tokenizer(languages, tokenize) if has_bleu else None, *_notes_on_files(files, lines)]
    if comet and len(texts.references) > 1:
        notes.append(f"COMET uses one reference: {files[0].references[0]}")
    if of_documents is not None and of_documents.reference is None:
        why = "no term occurs twice in a document" if lines.sources else "the source is unknown; give it with --source"
        notes.append(f"no consistency of terms: {why}")
    place = _without_words(texts.references, languages, kinds, tokenize) if has_bleu else None
    if place is not None:
        remedy = f"name the language (--target-language {script_language(texts.references[place])})"
        notes.append(
            f"{files[0].references[place]} has no spaces between words, so BLEU's tokenizer 13a counts phrases as "
            f"words; {'leave out --tokenize (scoring.tokenize)' if tokenize else remedy}"
        )
    else:
        notes += _doubts(files, texts, overall)
    return SideScores(
        name,
        list(files),
        segments,
        overall,
        _by_direction(texts.directions, systems, tests, progress, documents=documents),
        length_rows,
        [note for note in notes if note],
        of_documents,
    )


def _target_languages(reference: Path, lines: SystemTexts, language: str | None) -> tuple[list[str | None], str | None]:
    """Return the target language of each line, and a note on it, or None.

    It is `language`, else by the direction, else by the name or the script of the reference.
    """
    note = None
    if language is None and lines.directions is not None:
        return [languages_of(direction)[1] for direction in lines.directions], note
    if language is None:
        language = language_of(reference.name, lines.references[0])
        if bleu_tokenizer(language) != "13a":
            note = f"language of {reference}: {language}; --target-language names another"
    return [language] * len(lines.hypotheses[0]), note


def _by_length(
    texts: SystemTexts,
    systems: Sequence[Sequence[Statistics]],
    bleu: Sequence[tuple[str, Sequence[Any]]],
    kinds: np.ndarray,
    progress: ProgressBar,
) -> list[list[LengthRow]]:
    """Return the scores of each system by source length; `bleu` gives the length ratio if the scores lack BLEU."""
    assert texts.sources is not None
    rows = []
    for hypotheses, system in zip(texts.hypotheses, systems, strict=True):
        known = [of_metric for of_metric in system if of_metric.name == "BLEU"]
        (ratio,) = known or gather(bleu, hypotheses, texts.references, kinds=kinds, progress=progress)
        rows.append(by_length(texts.sources, system, ratio))
    return rows


def _by_direction(
    directions: Sequence[str] | None,
    systems: Sequence[Sequence[Statistics]],
    tests: Sequence[str],
    progress: ProgressBar,
    *,
    documents: bool,
) -> dict[str, tuple[int, Comparison]]:
    """Return the number of segments and the scores of each direction, if there are several."""
    if directions is None or len(set(directions)) == 1:
        return {}
    by_direction, all_directions = {}, np.array(directions)
    for direction in dict.fromkeys(directions):
        picked = all_directions == direction
        part = [[of_metric.of(picked) for of_metric in system] for system in systems]
        segments = int(picked.sum())
        resamples = _resamples(segments, documents)
        by_direction[direction] = segments, compare_systems(part, tests=tests, resamples=resamples, progress=progress)
    return by_direction


def _resamples(segments: int, documents: bool) -> int:
    """Return the number of resamples: 0 for a single document, which has no interval over documents."""
    return 0 if documents and segments == 1 else RESAMPLES


def _notes_on_files(files: Sequence[Translated], texts: SystemTexts) -> list[str]:
    """Return notes on byte order marks and on tokenised text."""
    notes = [
        f"{path} begins with a byte order mark, which mtkit skips; the sacrebleu command counts it as text"
        for path in texts.marked
    ]
    lines_by_path = {str(file.hypothesis): lines for file, lines in zip(files, texts.hypotheses, strict=True)}
    lines_by_path |= {str(path): lines for path, lines in zip(files[0].references, texts.references, strict=True)}
    for path, lines in lines_by_path.items():
        if _looks_tokenised(lines):
            notes.append(f"lines of {path} end in ' .' as tokenised text does; BLEU expects detokenised text")
    return notes


def _doubts(files: Sequence[Translated], texts: SystemTexts, comparison: Comparison) -> list[str]:
    """Return notes on scores that may be wrong, one at most for each system."""
    warnings = [
        (file.hypothesis, doubt(scores, hypotheses, texts.references))
        for file, scores, hypotheses in zip(files, comparison.scores, texts.hypotheses, strict=True)
    ]
    return [f"{path}: {warning}" for path, warning in warnings if warning]


def _without_words(
    references: Sequence[Sequence[str]], languages: Sequence[str | None], kinds: np.ndarray, tokenize: str | None
) -> int | None:
    """Return the index of the first reference that 13a tokenises but has no spaces between words, or None."""
    cut = [(tokenize or bleu_tokenizer(language)) == "13a" for language in languages]
    for number, lines in enumerate(references):
        if lacks_spaces([line for line, kind in zip(lines, kinds, strict=True) if cut[kind]]):
            return number
    return None


def _looks_tokenised(lines: Sequence[str]) -> bool:
    return sum(line.rstrip().endswith(" .") for line in lines) > TOKENISED * len(lines)
