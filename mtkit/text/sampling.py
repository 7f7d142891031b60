"""Subword sampling: other segmentations of words, drawn as pure functions of the word and a key.

BPE-dropout: Provilkov et al., "BPE-Dropout: Simple and Effective Subword Regularization", ACL 2020, arXiv 1910.13267.
Unigram sampling: Kudo, "Subword Regularization", ACL 2018, arXiv 1804.10959. sentencepiece samples both, but its draws
differ from process to process whatever its seed; these depend only on the words and keys, so a run can be repeated
and resumed.
"""

from array import array
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise
from math import exp, log
from sys import byteorder

import numpy as np

from mtkit.text.segments import Ragged, mix, uniform
from mtkit.text.tokenizer import Tokenizer

_REMEMBERED_WORDS = 1 << 19
"""Words whose number of merges is cached between calls, some hundred bytes each."""

_CHARACTERS = 1 << 17
"""Characters of words that are merged together: about as many as fit into a CPU's cache."""

_NEVER = 1 << 40
"""More merges than any word has; also the rank of a pair of pieces that do not merge."""

_BITS = 36
"""Probabilities are integers in units of 2^-36, so that one uint64 holds a place and a share of its probability."""

_REMEMBERED_PLACES = 1 << 22
"""Pieces at places of words that are cached between calls, 16 bytes each."""


class Words:
    """A tokenizer's words: stretches of pieces that no other piece can cross. A word is the bytes of its int32 pieces.

    A word ends between two characters that no piece contains as neighbours: before a space, and at most places within a
    sentence of a language without spaces. Fixed pieces are words of their own: control symbols (language tags, document
    breaks), unknown pieces, and bytes, whose characters are part of no piece.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        processor, vocabulary = tokenizer.processor, range(tokenizer.size)
        special = (processor.is_control, processor.is_unknown, processor.is_unused)
        self.fixed = np.array([any(kind(piece) for kind in special) for piece in vocabulary]) | tokenizer.is_byte
        """(vocabulary,) True for pieces that sampling keeps."""
        self._texts = [tokenizer.piece(piece) for piece in vocabulary]
        self.numbers = {self._texts[piece]: piece for piece in vocabulary if not self.fixed[piece]}
        """Pieces by their text, with U+2581 for a space."""
        self.scores = np.array([processor.get_score(piece) for piece in vocabulary])
        """(vocabulary,) sentencepiece's scores: high for early merges (bpe); log probabilities (unigram)."""
        characters = {character: number for number, character in enumerate(sorted(set("".join(self.numbers))), start=1)}
        self._first, self._last = (
            np.array([0 if self.fixed[piece] else characters[text[end]] for piece, text in enumerate(self._texts)])
            for end in (0, -1)
        )
        neighbours = {(characters[left], characters[right]) for text in self.numbers for left, right in pairwise(text)}
        self._base = len(characters) + 1
        self._neighbours = np.array(sorted(left * self._base + right for left, right in neighbours), dtype=np.int64)

    def text(self, word: bytes) -> str:
        """Return the characters of a word."""
        return "".join([self._texts[piece] for piece in np.frombuffer(word, dtype=np.int32).tolist()])

    def is_fixed(self, word: bytes) -> bool:
        """Return whether a word is a fixed piece."""
        return bool(self.fixed[np.frombuffer(word, dtype=np.int32)[0]])

    def split(self, rows: Ragged) -> tuple[list[bytes], np.ndarray]:
        """Return the words of all rows, and the number of words in each row, (rows,) int64."""
        begins = np.ones(len(rows.flat), dtype=bool)
        pairs = self._last[rows.flat[:-1]] * self._base + self._first[rows.flat[1:]]
        begins[1:] = ~np.isin(pairs, self._neighbours)
        begins[rows.starts[rows.lengths > 0]] = True
        bounds = (np.append(np.flatnonzero(begins), len(rows.flat)) * 4).tolist()
        content = rows.flat.tobytes()
        words = [content[begin:end] for begin, end in pairwise(bounds)]
        return words, rows.sums(begins.astype(np.int64))


class BpeDropout:
    """Draws segmentations with BPE dropout, as sentencepiece defines it.

    Whenever the best merge that is still possible is considered, it is dropped with the same probability, for good;
    other merges may still produce the same piece. The number of merges before a dropped one is geometric, so most words
    need one draw and no merging: if all their merges are made, they stay as they are.
    """

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
        # the last one stands for pairs that are not in the vocabulary
        self._pairs = np.array([*sorted(pairs), self._size**2])
        self._ranks = np.array([*(pairs[pair] for pair in sorted(pairs)), _NEVER])
        self._merges: dict[bytes, int] = {}

    def draw(self, words: list[bytes], keys: np.ndarray) -> Ragged:
        """Return drawn pieces of each word, a function of the word and its key, (words,) uint64."""
        self._count_merges(words)
        merges = np.array([self._merges[word] for word in words], dtype=np.int64)
        changed = np.flatnonzero(self._gaps(keys, np.zeros(1)) < merges)
        blocks = list(self._merge_words([words[place] for place in changed.tolist()], keys[changed]))
        lengths_before = np.fromiter(map(len, words), dtype=np.int32, count=len(words)) // np.int32(4)
        lengths = lengths_before.copy()
        for places, pieces, _ in blocks:
            lengths[changed[places]] = (pieces >= 0).sum(1)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        flat = np.empty(int(lengths.sum()), dtype=np.int32)
        same = np.ones(len(words), dtype=bool)
        same[changed] = False
        flat[np.repeat(same, lengths)] = np.frombuffer(b"".join(words), dtype=np.int32)[np.repeat(same, lengths_before)]
        for places, pieces, _ in blocks:
            row, column = np.nonzero(pieces >= 0)
            flat[starts[changed[places]][row] + column] = pieces[row, column]
        return Ragged(flat, lengths)

    def _count_merges(self, words: list[bytes]) -> None:
        """Cache the number of merges in each word without dropout."""
        if len(self._merges) > _REMEMBERED_WORDS:
            self._merges.clear()
        new = [word for word in dict.fromkeys(words) if word not in self._merges]
        self._merges.update((word, 0) for word in new if self._words.is_fixed(word))
        new = [word for word in new if word not in self._merges]
        for places, _, merges in self._merge_words(new, None):
            self._merges.update(zip((new[place] for place in places.tolist()), merges.tolist(), strict=True))

    def _gaps(self, keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Draw how many merges are made before the next is dropped, int64: the draw `numbers` of each key."""
        return np.minimum(np.log1p(-uniform(keys, numbers)) / self._rate, float(_NEVER)).astype(np.int64)

    def _merge_words(
        self, words: list[bytes], keys: np.ndarray | None
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Merge words from their characters, words of similar length together; without keys, no merge is dropped.

        Yields, for N words, their places (N,) in `words`, their pieces (N, longest) int64, padded with -1, and the
        number of merges considered (N,).
        """
        texts = [self._words.text(word) for word in words]
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(words))
        order = np.argsort(lengths, kind="stable")
        ends = np.cumsum(lengths[order])
        group = ends // _CHARACTERS * 64 + np.log2(np.maximum(lengths[order], 1)).astype(np.int64)
        for places in np.split(order, np.flatnonzero(np.diff(group)) + 1) if words else []:
            padding = np.arange(lengths[places].max()) >= lengths[places, None]
            pieces = np.full(padding.shape, -1)
            pieces[~padding] = [self._words.numbers[c] for c in chain.from_iterable(texts[place] for place in places)]
            yield places, *self._merge(pieces, None if keys is None else keys[places])

    def _merge(self, pieces: np.ndarray, keys: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Merge rows of (N, longest) pieces as far as possible; also return the number of merges considered (N,)."""
        result, merges = pieces, np.zeros(len(pieces), dtype=np.int64)
        pieces = np.pad(pieces, ((0, 0), (0, 1)), constant_values=-1)
        ranks = self._rank(pieces[:, :-1], pieces[:, 1:])  # of the pairs that may be merged
        draws = np.zeros(len(pieces), dtype=np.int64)
        until_drop = np.full(len(pieces), _NEVER) if keys is None else self._gaps(keys, draws)
        live, columns = np.arange(len(pieces)), np.arange(result.shape[1])
        while len(live):
            best = ranks.argmin(1)  # the leftmost of equal ones
            rank = ranks[np.arange(len(live)), best]
            if (rank == _NEVER).any():
                result[live] = pieces[:, :-1]
                going = rank < _NEVER
                live, pieces, ranks, until_drop, best, rank = (
                    values[going] for values in (live, pieces, ranks, until_drop, best, rank)
                )
            merges[live] += 1
            if keys is not None and len(dropped := np.flatnonzero(until_drop == 0)):
                ranks[dropped, best[dropped]] = _NEVER
                draws[live[dropped]] += 1
                until_drop[dropped] = self._gaps(keys[live[dropped]], draws[live[dropped]]) + 1
            rows = np.flatnonzero(ranks[np.arange(len(live)), best] < _NEVER)
            until_drop -= 1
            at, new = best[rows], self._by_rank[rank[rows]]
            shift = columns + (columns > at[:, None])
            pieces[rows, :-1] = np.take_along_axis(pieces[rows], shift, 1)
            pieces[rows, at] = new
            shifted = np.take_along_axis(ranks[rows], np.minimum(shift, columns[-1]), 1)
            shifted[np.arange(len(rows)), at] = self._rank(new, pieces[rows, at + 1])
            inner = np.flatnonzero(at > 0)
            shifted[inner, at[inner] - 1] = self._rank(pieces[rows[inner], at[inner] - 1], new[inner])
            ranks[rows] = shifted
        return result, merges

    def _rank(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the rank of the merge of these pieces, of the same shape; `_NEVER` if they do not merge."""
        pairs = np.where((left >= 0) & (right >= 0), left * self._size + right, self._size**2)
        places = np.searchsorted(self._pairs, pairs)
        return np.where(self._pairs[places] == pairs, self._ranks[places], _NEVER)


class UnigramSampling:
    """Draws segmentations with probabilities proportional to the product of their pieces' probabilities to the alpha.

    Forward filtering sums over the segmentations up to each character, once per word. Backward sampling then draws the
    last piece, the one before that, and so on.
    """

    def __init__(self, words: Words, alpha: float) -> None:
        """`alpha` above 0: the power of the probabilities; 1 keeps them, towards 0 all segmentations are alike."""
        self._words = words
        # all beginnings of pieces; those that are pieces, with their number and powered log probability
        self._prefixes: dict[str, tuple[int, float] | None] = {
            text[:end]: None for text in words.numbers for end in range(1, len(text))
        }
        self._prefixes |= {text: (piece, alpha * float(words.scores[piece])) for text, piece in words.numbers.items()}
        self._clear()

    def _clear(self) -> None:
        self._ends: dict[bytes, int] = {}
        # places are numbered over all words; each has a stretch of these arrays: the pieces that may end there
        self._places = 0
        self._until, self._piece, self._before = array("Q"), array("i"), array("i")

    def draw(self, words: list[bytes], keys: np.ndarray) -> Ragged:
        """Return drawn pieces of each word, a function of the word and its key, (words,) uint64."""
        if len(self._piece) > _REMEMBERED_PLACES:
            self._clear()
        known = map(self._ends.get, words)
        place = np.array(
            [self._filter(word) if end is None else end for word, end in zip(words, known, strict=True)], dtype=np.int64
        )
        until = np.frombuffer(self._until, dtype=np.uint64)
        piece, previous = (np.frombuffer(values, dtype=np.int32) for values in (self._piece, self._before))
        lengths, drawn = np.zeros(len(words), dtype=np.int32), list[tuple[np.ndarray, np.ndarray]]()
        live = np.arange(len(words))  # words whose beginning is not reached yet
        while len(live):
            share = mix(keys[live] + np.uint64(len(drawn))) >> np.uint64(64 - _BITS)
            chosen = np.searchsorted(until, (place.astype(np.uint64) << np.uint64(_BITS)) + share, side="right")
            drawn.append((live, piece[chosen]))
            lengths[live] += 1
            place = previous[chosen].astype(np.int64)
            live, place = live[place >= 0], place[place >= 0]
        ends = np.cumsum(lengths, dtype=np.int64)
        flat = np.empty(int(lengths.sum()), dtype=np.int32)
        for number, (rows, pieces) in enumerate(drawn, start=1):
            flat[ends[rows] - number] = pieces
        return Ragged(flat, lengths)

    def _filter(self, word: bytes) -> int:
        """Add the places of a word; return the place after its last character."""
        first = self._places
        if self._words.is_fixed(word):
            self._add([(0.0, int.from_bytes(word, byteorder), -1)])
        else:
            text = self._words.text(word)
            options: list[list[tuple[float, int, int]]] = [[] for _ in text]
            total, previous = 0.0, -1
            for begin in range(len(text)):
                if begin:
                    total, previous = self._add(options[begin - 1]), first + begin - 1
                for end in range(begin + 1, len(text) + 1):
                    if (part := text[begin:end]) not in self._prefixes:
                        break
                    if entry := self._prefixes[part]:
                        options[end - 1].append((total + entry[1], entry[0], previous))
            self._add(options[-1])
        self._ends[word] = self._places - 1
        return self._places - 1

    def _add(self, options: list[tuple[float, int, int]]) -> float:
        """Add a place, with the log-probability sum, number and previous place of each piece that may end there.

        Returns the log of the sum over all of them.
        """
        most = max(total for total, _, _ in options)
        sums = list(accumulate([exp(total - most) for total, _, _ in options]))
        base, unit = self._places << _BITS, (1 << _BITS) / sums[-1]
        self._until.extend([base + round(share * unit) for share in sums])
        self._piece.extend([piece for _, piece, _ in options])
        self._before.extend([previous for _, _, previous in options])
        self._places += 1
        return most + log(sums[-1])
