"""Term consistency: whether a document's translation has one word for each occurrence of a source word.

All occurrences of a source word in one document are compared in pairs. Term consistency is the percentage of pairs in
which both occurrences have the same translation, as LTCR (Lyu et al., "Encouraging Lexical Translation Consistency for
Document-Level Neural Machine Translation", EMNLP 2021). Words have no case and no punctuation, contain a letter, and
are not among the `FREQUENT` most frequent source words of the side, which are mostly function words. The translation of
an occurrence is the word that `mtkit.evaluation.word_links` links it to; occurrences without a link are left out.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from math import comb
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Score as SacrebleuScore

from mtkit.evaluation.metrics import CountedMetric
from mtkit.evaluation.statistics import Statistics
from mtkit.evaluation.word_links import link_pairs, terms_of
from mtkit.terminal import ProgressBar, silent

CONSISTENCY = "consistency"

FREQUENT = 100
"""Number of most frequent source words that are no terms; a tenth of the different words if there are few."""


class Consistency(CountedMetric):
    """Term consistency as a sacrebleu metric. Statistics of a document: pairs with the same translation, all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refs = 0

    def _compute_score_from_stats(self, stats: Any) -> Any:
        return SacrebleuScore(CONSISTENCY, 100 * float(stats[0]) / float(stats[1]) if stats[1] else 0.0)


def consistency(
    sources: Sequence[str],
    translations: Sequence[Sequence[str]],
    documents: list[list[int]],
    progress: ProgressBar = silent,
) -> list[Statistics]:
    """Return term consistency statistics over documents, for each list of translated lines.

    `documents` are the line numbers of each document, from 0.
    """
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
