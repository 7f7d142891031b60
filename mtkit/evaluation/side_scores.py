"""Scores of one side for `mtkit score`: by system, direction and source length, with differences and notes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtkit.data.progress import ProgressBar, silent
from mtkit.evaluation.by_length import LengthRow, by_length
from mtkit.evaluation.metrics import METRICS, missing_tokenizer
from mtkit.evaluation.scores import doubt, named_metrics, told_apart
from mtkit.evaluation.significance import TESTS, Comparison, compare_systems
from mtkit.evaluation.statistics import gather
from mtkit.evaluation.systems import Translated, read_texts
from mtkit.languages import bleu_tokenizer, lacks_spaces, languages_of

TOKENISED = 0.5
"""A text looks tokenised if a larger share of its lines ends in " ."."""


@dataclass(frozen=True)
class SideScores:
    """Scores of all systems on one side; the first system is the baseline."""

    name: str | None
    """Name of the side; None for files without a run."""
    files: list[Translated]
    segments: int
    overall: Comparison
    directions: dict[str, tuple[int, Comparison]]
    """Segments and scores by direction; empty if there is only one direction."""
    lengths: list[list[LengthRow]]
    """Scores by source length for each system; empty if not requested."""
    notes: list[str]
    """Warnings: tokenised text, or a tokenizer that is not installed or does not seem to fit the text."""


def score_side(
    name: str | None,
    files: Sequence[Translated],
    *,
    metrics: Sequence[str] = METRICS,
    tests: Sequence[str] = TESTS,
    lengths: bool = False,
    language: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    progress: ProgressBar = silent,
) -> SideScores:
    """Score a side's translations; `lengths` adds scores by source length, which require the sources.

    `language` is the target language of all segments. With None, it is taken from the file of directions, or unknown if
    there is no such file.

    Raises: DataError and MtkitError as `read_texts`, `named_metrics` and `compare_systems` do.
    """
    named_metrics(metrics, tokenize=tokenize)  # raises for unknown names before files are read
    texts = read_texts(files, sources=lengths)
    segments = len(texts.hypotheses[0])
    targets = [None] * segments if texts.directions is None else [languages_of(each)[1] for each in texts.directions]
    languages, kinds = told_apart(targets if language is None else [language] * segments)
    options: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase}
    chosen = named_metrics(metrics, languages, **options)
    bleu = named_metrics(["BLEU"], languages, **options) if lengths else []
    systems = [gather(chosen, each, texts.references, kinds=kinds, progress=progress) for each in texts.hypotheses]
    rows = []
    if texts.sources is not None:
        for hypotheses, system in zip(texts.hypotheses, systems, strict=True):
            known = [each for each in system if each.name == "BLEU"]
            (ratio,) = known or gather(bleu, hypotheses, texts.references, kinds=kinds, progress=progress)
            rows.append(by_length(texts.sources, system, ratio))
    by_direction = {}
    if texts.directions is not None and len(set(texts.directions)) > 1:
        all_directions = np.array(texts.directions)
        for direction in dict.fromkeys(texts.directions):
            picked = all_directions == direction
            part = [[each.of(picked) for each in system] for system in systems]
            by_direction[direction] = int(picked.sum()), compare_systems(part, tests=tests, progress=progress)
    lines_by_path = {str(each.hypothesis): lines for each, lines in zip(files, texts.hypotheses, strict=True)}
    lines_by_path |= {str(path): lines for path, lines in zip(files[0].references, texts.references, strict=True)}
    overall = compare_systems(systems, tests=tests, progress=progress)
    has_bleu = any(name == "BLEU" for name, _ in chosen)
    notes = [missing_tokenizer(languages, tokenize) if has_bleu else None]
    notes += [
        f"{path} begins with a byte order mark, which mtkit skips; the sacrebleu command counts it as text"
        for path in texts.marked
    ]
    for path, lines in lines_by_path.items():
        if _looks_tokenised(lines):
            notes.append(f"lines of {path} end in ' .' as tokenised text does; BLEU expects detokenised text")
    if has_bleu and (place := _without_words(texts.references, languages, kinds, tokenize)) is not None:
        notes.append(
            f"{files[0].references[place]} has no spaces between words, so BLEU's tokenizer 13a counts phrases as "
            "words; name the language (--target-language zh) or the tokenizer (--tokenize zh)"
        )
    else:
        for each, scores, hypotheses in zip(files, overall.scores, texts.hypotheses, strict=True):
            warning = doubt(scores, hypotheses, texts.references)
            notes.append(warning and f"{each.hypothesis}: {warning}")
    return SideScores(
        name,
        list(files),
        segments,
        overall,
        by_direction,
        rows,
        [note for note in notes if note],
    )


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
