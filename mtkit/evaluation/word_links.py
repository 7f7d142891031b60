"""Links between the words of lines and of given translations, learned from these pairs only: no model, no resources.

The model is fast_align's: Dyer, Chahuneau and Smith, "A Simple, Fast, and Effective Reparameterization of IBM
Model 2", NAACL 2013. Target word j of n translates source word i of m with the prior probability
(1 - p0) / Z * exp(-tension * |i / m - j / n|), or no word with p0; t(y | x) is learned by expectation and maximisation.
Departures: the tension is fixed, t has no Dirichlet prior, and a word has at most one link. Source word x at i and
target word y at j are linked if i has the largest posterior of all places for j, and y the largest strength of all
words of the line for x: t(y | x) * c(x, y) / c(y), with expected counts c. The strength is the same in all lines. So if
several characters translate a word, in scripts without spaces, the same character is linked each time.
"""

from collections.abc import Sequence
from functools import cache
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

from mtkit.decoding.ibm_model_1 import expectation_maximisation
from mtkit.evaluation.statistics import Numbers
from mtkit.terminal import ProgressBar, silent
from mtkit.text.words import words

NO_WORD = 0.08
"""p0, fast_align's default."""

TENSION = 4.0
"""fast_align's initial value."""

ITERATIONS = 5
"""fast_align's default."""

CELLS = 1 << 24
"""Maximum pairs of a source and a target word to learn from, about a GiB; of more text, every n-th line is used."""

LONGEST = 1000
"""Maximum words of a side; longer lines have no links."""

DIGITS, ALIKE = 9, 1e-9
"""Decimals of posteriors, and the relative difference up to which strengths are equal."""

Ids = NDArray[np.int64]


def terms_of(text: str) -> list[str]:
    """Return the words of a text without case and without punctuation and symbols, which separate words."""
    return words("".join(map(_letter, text.casefold())))


@cache
def _letter(character: str) -> str:
    """Return letters, marks, digits and invisible characters as they are, and a space for all others."""
    kind = category(character)
    return character if kind[0] in "LMN" or kind == "Cf" else " "


def link_pairs(
    sources: Sequence[Sequence[str]], targets: Sequence[Sequence[str]], progress: ProgressBar = silent
) -> list[list[tuple[int, int]]]:
    """Return the links of each pair of word lists, as numbers of a source and of a target word, in target order."""
    known: tuple[dict[str, int], dict[str, int]] = {"": 0}, {}  # source 0: no word
    rows = [
        [np.array([ids.setdefault(word, len(ids)) for word in line], dtype=np.int64) for line in lines]
        for ids, lines in zip(known, (sources, targets), strict=True)
    ]
    pairs = list(zip(*rows, strict=True))
    fitting = [pair for pair in pairs if 0 < len(pair[0]) <= LONGEST and 0 < len(pair[1]) <= LONGEST]
    size = len(known[1])
    table = _learn(fitting[:: _step(fitting)], size, progress) if fitting else None
    links: list[list[tuple[int, int]]] = []
    for source, target in progress(pairs, "linking words", len(pairs)):
        if table is None or not 0 < len(source) <= LONGEST or not 0 < len(target) <= LONGEST:
            links.append([])
            continue
        keys, likely, strength = table
        wanted = _keys(source, target, size)
        at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        learned = keys[at] == wanted
        joint = np.where(learned, likely[at], 0.0) * prior_of_places(len(source), len(target))
        # rounded: of equally likely places the first, whatever the order of sums
        posterior = (joint / np.maximum(joint.sum(1, keepdims=True), np.finfo(np.float64).tiny)).round(DIGITS)
        strong = np.where(learned, strength[at], 0.0)
        # of equally strong words, such as one that occurs twice in the line, the one with the largest posterior
        partner = np.where(strong >= strong.max(0) * (1 - ALIKE), posterior, -1.0).argmax(0)
        links.append(
            [
                (int(word) - 1, place)
                for place, word in enumerate(posterior.argmax(1))
                if word > 0 and posterior[place, word] > 0 and partner[word] == place
            ]
        )
    return links


def _step(pairs: Sequence[tuple[Ids, Ids]]) -> int:
    return max(1, -(-sum((len(source) + 1) * len(target) for source, target in pairs) // CELLS))


def _learn(pairs: Sequence[tuple[Ids, Ids]], size: int, progress: ProgressBar) -> tuple[Ids, Numbers, Numbers]:
    """Return the ascending keys of word pairs that occur together, and t(y | x) and strength of each pair."""
    cells = np.concatenate([_keys(source, target, size).ravel() for source, target in pairs])
    prior = np.concatenate([prior_of_places(len(source), len(target)).ravel() for source, target in pairs])
    sizes = np.concatenate([np.full(len(target), len(source) + 1) for source, target in pairs])
    keys, cells = np.unique(cells, return_inverse=True)
    iterations = progress(range(ITERATIONS), "learning word links", ITERATIONS)
    likely, counts = expectation_maximisation(keys // size, cells, sizes, iterations, prior)
    of_targets = np.bincount(keys % size, weights=counts)
    return keys, likely, likely * counts / of_targets[keys % size]


def _keys(source: Ids, target: Ids, size: int) -> Ids:
    """Return a number for each target word with each source word, no word first: (target, 1 + source)."""
    return np.concatenate([[0], source]) * size + target[:, None]


def prior_of_places(source: int, target: int) -> Numbers:
    """Return the prior probabilities (target, 1 + source) for these numbers of words."""
    places = np.arange(1, source + 1) / source, np.arange(1, target + 1)[:, None] / target
    near = np.exp(-TENSION * np.abs(places[0] - places[1]))
    near *= (1 - NO_WORD) / near.sum(1, keepdims=True)
    return np.concatenate([np.full((target, 1), NO_WORD), near], 1)
