"""Words as draws see them: stretches of pieces that no other piece reaches across, so each is cut by itself."""

from itertools import pairwise

import numpy as np

from mtkit.data.segments import Ragged
from mtkit.data.tokenizer import Tokenizer


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
