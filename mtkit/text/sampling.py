"""Words as draws see them: stretches of pieces that no other piece reaches across, so each is cut by itself.

BPE dropout (Provilkov et al., ACL 2020) as sentencepiece does it, with draws that are a function of keys.

Whenever the best merge that is still possible is looked at, it is left out with the same probability: for good, though
the same piece may come about by another merge. How many merges are made before one is left out is geometric, so most
words need one draw and no merging: where all their merges are made, they stay as they are.

Unigram sampling (Kudo, ACL 2018) over all ways to cut a word, with draws that are a function of keys.

A way has the product of its pieces' probabilities to the power of alpha. Forward filtering sums over the ways up to
each character, once for a word; backward sampling then draws its last piece, the one before that, and so on.
"""

from array import array
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise
from math import exp, log
from sys import byteorder
from typing import NamedTuple

import numpy as np

from mtkit.text.segments import Ragged, mixed, uniform
from mtkit.text.tokenizer import Tokenizer


class Words:
    """What a tokenizer's words are, and what they are spelt with; a word is written as the bytes of its int32 pieces.

    One ends between two characters that stand beside one another in no piece: before a space, and at most places within
    a sentence of a language without spaces. Pieces that stay where they are, control symbols (language tags, document
    breaks), unknown pieces, and bytes, which stand for characters that are part of no piece, are words of their own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        processor, every = tokenizer.processor, range(tokenizer.size)
        special = (processor.is_control, processor.is_unknown, processor.is_unused)
        self.fixed = np.array([any(kind(each) for kind in special) for each in every])
        """(vocabulary,) True for the pieces that stay where they are."""
        self.fixed |= tokenizer.is_byte
        self._spelt = [tokenizer.piece(each) for each in every]
        self.numbers = {self._spelt[each]: each for each in every if not self.fixed[each]}
        """Pieces by their spelling, U+2581 for a space."""
        self.scores = np.array([processor.get_score(each) for each in every])
        """(vocabulary,) what sentencepiece prefers: the merges of high scores (bpe); logarithms of probabilities."""
        characters = {character: number for number, character in enumerate(sorted(set("".join(self.numbers))), start=1)}
        self._first, self._last = (
            np.array([0 if self.fixed[each] else characters[text[end]] for each, text in enumerate(self._spelt)])
            for end in (0, -1)
        )
        neighbours = {(characters[one], characters[two]) for text in self.numbers for one, two in pairwise(text)}
        self._more = len(characters) + 1
        self._neighbours = np.array(sorted(one * self._more + two for one, two in neighbours), dtype=np.int64)

    def spelt(self, word: bytes) -> str:
        """The characters of a word."""
        return "".join([self._spelt[piece] for piece in np.frombuffer(word, dtype=np.int32).tolist()])

    def stays(self, word: bytes) -> bool:
        """Whether a word is a piece that stays as it is."""
        return bool(self.fixed[np.frombuffer(word, dtype=np.int32)[0]])

    def of(self, rows: Ragged) -> tuple[list[bytes], np.ndarray]:
        """The words of all rows, and (rows,) int64 how many each row has."""
        begins = np.ones(len(rows.flat), dtype=bool)
        beside = self._last[rows.flat[:-1]] * self._more + self._first[rows.flat[1:]]
        begins[1:] = ~np.isin(beside, self._neighbours)
        starts = np.cumsum(rows.lengths, dtype=np.int64) - rows.lengths
        begins[starts[rows.lengths > 0]] = True
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(begins)])
        bounds = (np.append(np.flatnonzero(begins), len(rows.flat)) * 4).tolist()
        together = rows.flat.tobytes()
        words = [together[begin:end] for begin, end in pairwise(bounds)]
        return words, before[starts + rows.lengths] - before[starts]


_REMEMBERED_WORDS = 1 << 19
"""Words whose number of merges is remembered from one call to the next, some hundred bytes each."""

_CHARACTERS = 1 << 17
"""Characters of words that are merged together: about as many as caches hold."""

_NEVER = 1 << 40
"""More merges than any word has; also the rank of a pair that is no piece."""


class _Merged(NamedTuple):
    """What N words have become."""

    places: np.ndarray
    """(N,) among the words that were given."""
    pieces: np.ndarray
    """(N, longest) int64, with -1 behind those of each word."""
    merges: np.ndarray
    """(N,) how many were looked at."""


class BpeDropout:
    """Draws what words become where merges are left out with some probability."""

    def __init__(self, words: Words, probability: float) -> None:
        """`probability` above 0 and below 1."""
        self._words, numbers = words, words.numbers
        self._rate = float(np.log1p(-probability))
        self._by_rank = np.array(sorted(numbers.values(), key=lambda piece: -words.scores[piece]))
        ranks = {piece: rank for rank, piece in enumerate(self._by_rank.tolist())}
        self._size = len(words.scores)
        pairs = {
            numbers[text[:cut]] * self._size + numbers[text[cut:]]: ranks[piece]
            for text, piece in numbers.items()
            for cut in range(1, len(text))
            if text[:cut] in numbers and text[cut:] in numbers
        }
        # one behind all: it is there to be looked up and not found
        self._pairs = np.array([*sorted(pairs), self._size**2])
        self._ranks = np.array([*(pairs[pair] for pair in sorted(pairs)), _NEVER])
        self._merges: dict[bytes, int] = {}

    def draw(self, words: list[bytes], keys: np.ndarray) -> Ragged:
        """Other pieces of each word: a function of the word and its key, (words,) uint64."""
        self._count_merges(words)
        merges = np.array([self._merges[word] for word in words], dtype=np.int64)
        others = np.flatnonzero(self._gaps(keys, np.zeros(1)) < merges)
        cut = list(self._merged([words[place] for place in others.tolist()], keys[others]))
        before = np.fromiter(map(len, words), dtype=np.int32, count=len(words)) // np.int32(4)
        lengths = before.copy()
        for block in cut:
            lengths[others[block.places]] = (block.pieces >= 0).sum(1)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        flat = np.empty(int(lengths.sum()), dtype=np.int32)
        kept = np.ones(len(words), dtype=bool)
        kept[others] = False
        flat[np.repeat(kept, lengths)] = np.frombuffer(b"".join(words), dtype=np.int32)[np.repeat(kept, before)]
        for block in cut:
            row, column = np.nonzero(block.pieces >= 0)
            flat[starts[others[block.places]][row] + column] = block.pieces[row, column]
        return Ragged(flat, lengths)

    def _count_merges(self, words: list[bytes]) -> None:
        """Have in mind how many merges each word takes where none is left out."""
        if len(self._merges) > _REMEMBERED_WORDS:
            self._merges.clear()
        new = [word for word in dict.fromkeys(words) if word not in self._merges]
        self._merges.update((word, 0) for word in new if self._words.stays(word))
        new = [word for word in new if word not in self._merges]
        for places, _, merges in self._merged(new, None):
            self._merges.update(zip((new[place] for place in places.tolist()), merges.tolist(), strict=True))

    def _gaps(self, keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """How many merges are made before the next is left out, int64: a draw of this number of each key."""
        return np.minimum(np.log1p(-uniform(keys, numbers)) / self._rate, float(_NEVER)).astype(np.int64)

    def _merged(self, words: list[bytes], keys: np.ndarray | None) -> Iterator[_Merged]:
        """Words merged from their characters, but for what their keys say, words of like length together."""
        spelt = [self._words.spelt(word) for word in words]
        lengths = np.fromiter(map(len, spelt), dtype=np.int64, count=len(words))
        order = np.argsort(lengths, kind="stable")
        ends = np.cumsum(lengths[order])
        alike = ends // _CHARACTERS * 64 + np.log2(np.maximum(lengths[order], 1)).astype(np.int64)
        for places in np.split(order, np.flatnonzero(np.diff(alike)) + 1) if words else []:
            behind = np.arange(lengths[places].max()) >= lengths[places, None]
            pieces = np.full(behind.shape, -1)
            pieces[~behind] = [self._words.numbers[c] for c in chain.from_iterable(spelt[place] for place in places)]
            yield _Merged(places, *self._merge(pieces, None if keys is None else keys[places]))

    def _merge(self, pieces: np.ndarray, keys: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Rows of (N, longest) pieces merged as far as they go, and (N,) how many merges were looked at."""
        result, merges = pieces, np.zeros(len(pieces), dtype=np.int64)
        pieces = np.pad(pieces, ((0, 0), (0, 1)), constant_values=-1)
        ranks = self._rank(pieces[:, :-1], pieces[:, 1:])  # of the pairs that may be merged
        draws = np.zeros(len(pieces), dtype=np.int64)
        ahead = np.full(len(pieces), _NEVER) if keys is None else self._gaps(keys, draws)
        live, columns = np.arange(len(pieces)), np.arange(result.shape[1])
        while len(live):
            best = ranks.argmin(1)  # the leftmost of equal ones
            rank = ranks[np.arange(len(live)), best]
            if (rank == _NEVER).any():
                result[live] = pieces[:, :-1]
                going = rank < _NEVER
                live, pieces, ranks, ahead, best, rank = (
                    each[going] for each in (live, pieces, ranks, ahead, best, rank)
                )
            merges[live] += 1
            if keys is not None and len(out := np.flatnonzero(ahead == 0)):
                ranks[out, best[out]] = _NEVER
                draws[live[out]] += 1
                ahead[out] = self._gaps(keys[live[out]], draws[live[out]]) + 1
            made = np.flatnonzero(ranks[np.arange(len(live)), best] < _NEVER)
            ahead -= 1
            at, new = best[made], self._by_rank[rank[made]]
            taken = columns + (columns > at[:, None])
            pieces[made, :-1] = np.take_along_axis(pieces[made], taken, 1)
            pieces[made, at] = new
            shifted = np.take_along_axis(ranks[made], np.minimum(taken, columns[-1]), 1)
            shifted[np.arange(len(made)), at] = self._rank(new, pieces[made, at + 1])
            inner = np.flatnonzero(at > 0)
            shifted[inner, at[inner] - 1] = self._rank(pieces[made[inner], at[inner] - 1], new[inner])
            ranks[made] = shifted
        return result, merges

    def _rank(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """How early these pieces are merged into one, of the same shape; `_NEVER` where they are none together."""
        pairs = np.where((left >= 0) & (right >= 0), left * self._size + right, self._size**2)
        places = np.searchsorted(self._pairs, pairs)
        return np.where(self._pairs[places] == pairs, self._ranks[places], _NEVER)


_BITS = 36
"""Probabilities are kept in units of 2^-36, so that one integer holds a place and a share of the draw there."""

_REMEMBERED_PLACES = 1 << 22
"""Pieces at places of words that are remembered from one call to the next, 16 bytes each."""


class UnigramSampling:
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
        if len(self._piece) > _REMEMBERED_PLACES:
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
