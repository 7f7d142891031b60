"""Alignment error rate: links between words compared with the gold links of annotators.

Och and Ney, "A Systematic Comparison of Various Statistical Alignment Models", Computational Linguistics 29 (2003):
annotators mark sure links S and possible ones P, which include S. For links A, precision = |A & P| / |A|, recall =
|A & S| / |S|, and the alignment error rate = 1 - (|A & S| + |A & P|) / (|A| + |S|).
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Score as SacrebleuScore

from mtkit.decoding.alignment import check_weights
from mtkit.decoding.alignment_heads import Heads
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError
from mtkit.evaluation.metrics import CountedMetric
from mtkit.evaluation.report import SURE, difference_cells
from mtkit.evaluation.significance import TESTS, Comparison, compare_systems
from mtkit.evaluation.statistics import Statistics
from mtkit.terminal import ProgressBar, Say, aligned, quiet, silent
from mtkit.text.text_files import Lines
from mtkit.text.words import word_starts

Link = tuple[int, int]
"""Numbers of a source word and of a target word, from 0."""

METRICS = ("AER", "precision", "recall")

_PHARAOH = re.compile(r"(\d{1,9})([-p?])(\d{1,9})")
_NAACL = re.compile(r"(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})(?:\s+([SP]))?(?:\s+[\d.eE+-]+)?")
_SPACED_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class GoldLinks:
    """The links of one line."""

    sure: frozenset[Link]
    possible: frozenset[Link]
    """Sure links included."""


def read_links(path: Path, lines: int | None = None, *, one_based: bool = False) -> list[GoldLinks]:
    """Read the links of each line in Pharaoh's or in NAACL's form.

    Pharaoh: a line for each line of text, as `0-0 1p2 2?1`, with p or ? for possible links; `one_based` numbers words
    from 1. NAACL (Mihalcea and Pedersen, 2003): a line for each link, as `18 1 2 P`: number of the line, source word
    and target word, all from 1, then S or P (S if missing), perhaps a confidence. Links of word 0, the empty word, are
    left out. `lines` is the number of lines of text; None: the number in the file.

    Raises: DataError, with the line, for text in another form, and if the number of lines differs.
    """
    texts = [line.strip() for line in Lines(path)]
    links = _read_naacl(path, texts, lines) if _is_naacl(texts) else _read_pharaoh(path, texts, 1 if one_based else 0)
    if lines is not None and len(links) != lines:
        raise DataError(f"{path} has links of {len(links):,} lines, and there are {lines:,} lines of text")
    if not links:
        raise DataError(f"{path} has no links; give a file with some")
    return links


def read_systems(
    file: Path, hypotheses: Sequence[Path], *, one_based: bool = False
) -> tuple[list[GoldLinks], list[list[set[Link]]]]:
    """Read gold links and the links of several systems, for the same number of lines; `one_based` applies to the gold.

    The last lines of a gold file in NAACL's form may have no link, so that the largest file has the number of lines.

    Raises: DataError as `read_links`.
    """
    gold = read_links(file, one_based=one_based)
    if _is_naacl([line.strip() for line in Lines(file)]):
        gold = read_links(file, max([len(gold), *(len(read_links(path)) for path in hypotheses)]))
    return gold, [[set(line.possible) for line in read_links(path, len(gold))] for path in hypotheses]


def _is_naacl(texts: Sequence[str]) -> bool:
    return _NAACL.fullmatch(next(filter(None, texts), "")) is not None


def _read_pharaoh(path: Path, texts: Sequence[str], first: int) -> list[GoldLinks]:
    links = []
    for number, text in enumerate(texts, start=1):
        sure, possible = set[Link](), set[Link]()
        for item in text.split():
            match = _PHARAOH.fullmatch(item)
            if match is None:
                raise DataError(f"{path}, line {number:,}: {item[:40]!r} is not a link such as 0-0, 1p2 or 1?2")
            link = int(match[1]) - first, int(match[3]) - first
            if min(link) < 0:
                raise DataError(f"{path}, line {number:,}: {item} has a word 0; leave --one-based out")
            possible.add(link)
            if match[2] == "-":
                sure.add(link)
        links.append(GoldLinks(frozenset(sure), frozenset(possible)))
    return links


def _read_naacl(path: Path, texts: Sequence[str], lines: int | None) -> list[GoldLinks]:
    by_line: dict[int, tuple[set[Link], set[Link]]] = {}
    for number, text in enumerate(texts, start=1):
        match = _NAACL.fullmatch(text)
        if match is None:
            raise DataError(f"{path}, line {number:,}: {text[:40]!r} is not a link such as 18 1 2 S")
        line, source, target = int(match[1]), int(match[2]), int(match[3])
        if line < 1 or (lines is not None and line > lines):
            raise DataError(f"{path}, line {number:,}: there is no line {line:,} of text; lines are numbered from 1")
        sure, possible = by_line.setdefault(line - 1, (set(), set()))
        if source and target:
            possible.add((source - 1, target - 1))
            if match[4] != "P":
                sure.add((source - 1, target - 1))
    count = max(by_line, default=-1) + 1 if lines is None else lines
    return [GoldLinks(*map(frozenset, by_line.get(line, ((), ())))) for line in range(count)]


def link_words(
    translator: Translator,
    sources: Sequence[str],
    targets: Sequence[str],
    gold: Sequence[GoldLinks],
    *,
    heads: Heads | None = None,
    direction: str | None = None,
    say: Say = quiet,
    progress: ProgressBar = silent,
) -> list[set[Link]]:
    """Link the words of given translations by the attention of the translator's run.

    `heads` are the heads whose attention is used; None: the heads that align words best (`Translator.word_heads`).

    Words are separated by white space. If the gold links have more words than a side then has, each character of
    Chinese, Japanese, Thai, Lao, Khmer and Burmese text is a word (`mtkit.text.words`); `say` gets a message.

    Raises: DataError for unequal numbers of lines, gold links of more words than the text has, and text that is too
    long for the model; MtkitError if the run's attention to the source has no weights.
    """
    check_weights(translator.network)
    if len(sources) != len(targets):
        raise DataError(f"{len(sources):,} source lines and {len(targets):,} target lines do not make pairs")
    counts = [[max((link[side] for link in line.possible), default=-1) + 1 for line in gold] for side in range(2)]
    maps = [
        _word_map(name, texts, counts[side], say)
        for side, (name, texts) in enumerate((("source", sources), ("target", targets)))
    ]
    heads = heads or translator.word_heads(say=say, progress=progress)
    linked = translator.link_targets(translator.source(sources, direction=direction), targets, heads)
    return [
        {(maps[0][line][source], maps[1][line][target]) for source, target in links}
        for line, links in enumerate(linked)
    ]


def _word_map(side: str, texts: Sequence[str], counts: Sequence[int], say: Say) -> list[list[int]]:
    """Return for each line the gold number of each of mtkit's words; `counts` are the words that gold links need."""
    spaced = [[match.start() for match in _SPACED_WORD.finditer(text)] for text in texts]
    starts_of_words = [word_starts(text) for text in texts]
    if all(map(int.__le__, counts, map(len, spaced))):
        pairs = zip(spaced, starts_of_words, strict=True)
        return [[bisect_right(starts, start) - 1 for start in words] for starts, words in pairs]
    for number, (count, words) in enumerate(zip(counts, starts_of_words, strict=True), start=1):
        if count > len(words):
            raise DataError(
                f"{side} line {number:,} has {len(words):,} words, and its gold links have a word {count:,} (from 1); "
                "give the tokenised text that was annotated, and --one-based if its words are numbered from 1"
            )
    say(f"each character of the {side} is a word, as its gold links count more words than there are between spaces")
    return [list(range(len(words))) for words in starts_of_words]


class LinkMetric(CountedMetric):
    """AER, precision or recall as a sacrebleu metric, in per cent.

    Statistics of a line: |A & P|, |A|, |A & S|, |S|. An empty denominator gives 0.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.num_refs = name, 1

    def _compute_score_from_stats(self, stats: Any) -> Any:
        hits, links, sure_hits, sure = (float(value) for value in stats)
        share, total = {
            "AER": (links + sure - sure_hits - hits, links + sure),
            "precision": (hits, links),
            "recall": (sure_hits, sure),
        }[self.name]
        return SacrebleuScore(self.name, 100 * share / total if total else 0.0)


def compare_links(
    gold: Sequence[GoldLinks],
    systems: Sequence[Sequence[set[Link]]],
    *,
    tests: Sequence[str] = TESTS,
    progress: ProgressBar = silent,
) -> Comparison:
    """Score systems' links by METRICS, with intervals and paired tests over lines; all have as many lines as `gold`.

    Raises: MtkitError for an unknown test.
    """
    kinds = np.zeros(len(gold), dtype=np.intp)
    statistics = []
    for links in systems:
        counts = [
            (len(line & known.possible), len(line), len(line & known.sure), len(known.sure))
            for line, known in zip(links, gold, strict=True)
        ]
        rows = np.array(counts, dtype=np.float64).reshape(-1, 4)
        statistics.append([Statistics(name, [LinkMetric(name)], rows, kinds) for name in METRICS])
    return compare_systems(statistics, tests=tests, progress=progress)


def links_text(file: str, names: Sequence[str], gold: Sequence[GoldLinks], comparison: Comparison) -> str:
    """Return a table with a line for each system, below a title."""
    sure, possible = (sum(len(getattr(line, kind)) for line in gold) for kind in ("sure", "possible"))
    title = f"{file}: {len(gold):,} lines, {sure:,} sure and {possible - sure:,} possible links"
    rows = [["system", "AER", "95% interval", "precision", "recall", "difference", "p bootstrap", "p randomisation"]]
    for number, (name, (error_rate, *others)) in enumerate(zip(names, comparison.scores, strict=True)):
        difference = comparison.differences[number - 1][0] if number else None
        cells = [error_rate.text, error_rate.interval, *(score.text for score in others)]
        rows.append([name, *cells, *difference_cells(difference)])
    parts = [title, aligned(rows if len(names) > 1 else [row[:5] for row in rows])]
    if len(names) > 1:
        parts.append(
            f"difference: the AER minus the AER of {names[0]}; lower is better; p is two-sided, * below {SURE}"
        )
    return "\n\n".join(parts)


def links_object(file: str, names: Sequence[str], gold: Sequence[GoldLinks], comparison: Comparison) -> dict[str, Any]:
    """Return the JSON object of unrounded numbers."""
    differences = [[], *comparison.differences]
    systems = [
        {"name": name, "scores": list(map(asdict, scores)), "differences": list(map(asdict, tested))}
        for name, scores, tested in zip(names, comparison.scores, differences, strict=True)
    ]
    sure, possible = (sum(len(getattr(line, kind)) for line in gold) for kind in ("sure", "possible"))
    return {"file": file, "lines": len(gold), "sure": sure, "possible": possible, "systems": systems}
