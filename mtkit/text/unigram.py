"""Unigram sampling (Kudo, ACL 2018) over all ways to cut a word, with draws that are a function of keys.

A way has the product of its pieces' probabilities to the power of alpha. Forward filtering sums over the ways up to
each character, once for a word; backward sampling then draws its last piece, the one before that, and so on.
"""

from array import array
from itertools import accumulate
from math import exp, log
from sys import byteorder

import numpy as np

from mtkit.text.bpe_dropout import Words
from mtkit.text.segments import Ragged, mixed

_BITS = 36
"""Probabilities are kept in units of 2^-36, so that one integer holds a place and a share of the draw there."""

_REMEMBERED = 1 << 22
"""Pieces at places of words that are remembered from one call to the next, 16 bytes each."""


class Sampling:
    """Draws what words become where every way to cut them may come."""

    def __init__(self, words: Words, alpha: float) -> None:
        """`alpha` above 0: the power of the probabilities; 1 takes them as they are, towards 0 all ways alike."""
        self._words = words
        # what a piece may begin with, and where that is a piece itself, its number and what its probability has become
        self._known: dict[str, tuple[int, float] | None] = {
            text[:end]: None for text in words.numbers for end in range(1, len(text))
        }
        self._known |= {text: (piece, alpha * float(words.scores[piece])) for text, piece in words.numbers.items()}
        self._forget()

    def _forget(self) -> None:
        self._ends: dict[bytes, int] = {}
        # places are numbered over all words; each has the pieces that may end there, as a stretch of these
        self._places = 0
        self._until, self._piece, self._before = array("Q"), array("i"), array("i")

    def draw(self, words: list[bytes], keys: np.ndarray) -> Ragged:
        """Other pieces of each word: a function of the word and its key, (words,) uint64."""
        if len(self._piece) > _REMEMBERED:
            self._forget()
        known = map(self._ends.get, words)
        place = np.array(
            [self._filtered(word) if each is None else each for word, each in zip(words, known, strict=True)],
            dtype=np.int64,
        )
        until, piece, before = (
            np.frombuffer(each, dtype=kind)
            for each, kind in ((self._until, np.uint64), (self._piece, np.int32), (self._before, np.int32))
        )
        lengths, drawn = np.zeros(len(words), dtype=np.int32), list[tuple[np.ndarray, np.ndarray]]()
        left = np.arange(len(words))  # words that do not reach back to their beginning yet
        while len(left):
            share = mixed(keys[left] + np.uint64(len(drawn))) >> np.uint64(64 - _BITS)
            chosen = np.searchsorted(until, (place.astype(np.uint64) << np.uint64(_BITS)) + share, side="right")
            drawn.append((left, piece[chosen]))
            lengths[left] += 1
            place = before[chosen].astype(np.int64)
            left, place = left[place >= 0], place[place >= 0]
        ends = np.cumsum(lengths, dtype=np.int64)
        flat = np.empty(int(lengths.sum()), dtype=np.int32)
        for number, (those, pieces) in enumerate(drawn, start=1):
            flat[ends[those] - number] = pieces
        return Ragged(flat, lengths)

    def _filtered(self, word: bytes) -> int:
        """The place behind the last character of a word, whose pieces at each place are added."""
        first = self._places
        if self._words.stays(word):
            self._add([(0.0, int.from_bytes(word, byteorder), -1)])
        else:
            spelt = self._words.spelt(word)
            ways: list[list[tuple[float, int, int]]] = [[] for _ in spelt]
            summed, before = 0.0, -1
            for begin in range(len(spelt)):
                if begin:
                    summed, before = self._add(ways[begin - 1]), first + begin - 1
                for end in range(begin + 1, len(spelt) + 1):
                    if (text := spelt[begin:end]) not in self._known:
                        break
                    if found := self._known[text]:
                        ways[end - 1].append((summed + found[1], found[0], before))
            self._add(ways[-1])
        self._ends[word] = self._places - 1
        return self._places - 1

    def _add(self, ways: list[tuple[float, int, int]]) -> float:
        """Add a place: of each piece that may end there the logarithm of the summed ways, its number, the place before.

        Gives the logarithm of all ways together.
        """
        most = max(way for way, _, _ in ways)
        reached = list(accumulate([exp(way - most) for way, _, _ in ways]))
        base, unit = self._places << _BITS, (1 << _BITS) / reached[-1]
        self._until.extend([base + round(share * unit) for share in reached])
        self._piece.extend([piece for _, piece, _ in ways])
        self._before.extend([before for _, _, before in ways])
        self._places += 1
        return most + log(reached[-1])
