"""Subword regularisation: training text cut into other pieces each epoch, as a pure function of seed and place.

Papers: Provilkov et al., "BPE-Dropout", ACL 2020, arXiv 1910.13267; Kudo, "Subword Regularization", ACL 2018, arXiv
1804.10959. Both sides are drawn anew from the pieces themselves: they are joined to the normalised text that they
spell, and sentencepiece samples another way to cut it. Control symbols (language tags, document breaks) and unknown
pieces stay where they are, and what lies between them is drawn by itself.
"""

import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import sentencepiece

from mtkit.data.prepared import Side, Tokens
from mtkit.data.tokenizer import Tokenizer, Tokenizers
from mtkit.errors import RecipeError
from mtkit.recipe.data import TokenizerSettings

_SAMPLING = threading.Lock()
"""sentencepiece's random generators take their seed from one place for the whole process."""


class Sampler:
    """Draws other segmentations for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, strength: float) -> None:
        """`strength` is the probability that a merge is left out (bpe), or the power of probabilities (unigram)."""
        self._processor, self._strength = tokenizer.processor, strength
        fixed = (
            self._processor.is_control(piece) or self._processor.is_unknown(piece) for piece in range(tokenizer.size)
        )
        self._fixed = np.fromiter(fixed, dtype=bool, count=tokenizer.size)
        # with U+2581 for spaces, those before the first word too, and bytes by their values
        self._spelling = [self._processor.id_to_piece(piece) for piece in range(tokenizer.size)]

    def draw(self, pieces: np.ndarray, seed: int) -> list[int]:
        """Pieces that spell the same; the same ones for the same `seed` (below 2^31), in any thread and process."""
        fixed = np.flatnonzero(self._fixed[pieces])
        with _SAMPLING:
            sentencepiece.set_random_generator_seed(seed)
            if not len(fixed):
                return self._cut_anew(pieces.tolist())
            result: list[int] = []
            for begin, end in pairwise([-1, *fixed, len(pieces)]):
                result += self._cut_anew(pieces[begin + 1 : end].tolist())
                result += pieces[end : end + 1].tolist()
        return result

    def _cut_anew(self, pieces: list[int]) -> list[int]:
        """The same pieces where their text is not what they were cut from: bytes that are no characters."""
        text: str = self._processor.decode(pieces)
        drawn: list[int] = self._processor.encode(text, enable_sampling=True, alpha=self._strength, nbest_size=-1)
        return drawn if self._spelt(drawn) == self._spelt(pieces) else pieces

    def _spelt(self, pieces: list[int]) -> str:
        return "".join([self._spelling[piece] for piece in pieces])


class Resegmentation:
    """What the settings of a training ask for, for both sides of its text."""

    def __init__(self, tokenizers: Tokenizers, strength: float, *, longest: int, seed: int) -> None:
        """A row that would have more than `longest` pieces on a side, end mark counted, keeps that side as it is."""
        self._source = Sampler(tokenizers.source, strength)
        self._target = self._source if tokenizers.joint else Sampler(tokenizers.target, strength)
        self._longest, self._seed = longest, seed

    def of(self, side: Side, rows: np.ndarray, *, epoch: int, part: int) -> Side:
        """These rows of a side in other pieces: a row's depend on seed, epoch, part, and its place among `rows`."""
        seeds = np.random.default_rng((self._seed, epoch, 2, part)).integers(1 << 31, size=(len(rows), 2)).tolist()
        source = [self._row(self._source, side.source[row], own) for row, (own, _) in zip(rows, seeds, strict=True)]
        target = [self._row(self._target, side.target[row], own) for row, (_, own) in zip(rows, seeds, strict=True)]
        return side.drawn(rows, _tokens(source), _tokens(target))

    def _row(self, sampler: Sampler, pieces: np.ndarray, seed: int) -> np.ndarray:
        drawn = sampler.draw(pieces, seed)
        return np.array(drawn, dtype=np.int32) if len(drawn) < self._longest else pieces


def strength_of(tokenizer: TokenizerSettings, *, dropout: float, alpha: float) -> float:
    """How strongly text is cut otherwise, 0 for not at all: by `dropout` for bpe, by `alpha` for unigram.

    Raises: RecipeError where the setting of the other kind is given.
    """
    names = {"bpe": ("subword_dropout", "subword_alpha"), "unigram": ("subword_alpha", "subword_dropout")}
    given = {"subword_dropout": dropout, "subword_alpha": alpha}
    own, other = names[tokenizer.kind]
    if given[other]:
        raise RecipeError(
            f"training.{other} = {given[other]} does not go with a {tokenizer.kind} tokenizer; set training.{own}"
        )
    return given[own]


def _tokens(rows: Sequence[np.ndarray]) -> Tokens:
    """A column of these rows."""
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    # one element at least: padding is gathered from some place
    flat = np.concatenate([*rows, np.zeros(1, dtype=np.int32)])
    return Tokens(flat, np.cumsum(lengths, dtype=np.int64) - lengths, lengths)
