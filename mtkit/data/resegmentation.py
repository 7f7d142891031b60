"""The training side in other pieces: a row's are a function of the training's seed, the epoch, the row and the side."""

from typing import Protocol

import numpy as np

from mtkit.data.prepared import Side, Tokens
from mtkit.errors import RecipeError
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.bpe_dropout import BpeDropout, Words
from mtkit.text.segments import Ragged, mixed
from mtkit.text.tokenizer import Tokenizer, Tokenizers
from mtkit.text.unigram import Sampling


class Draw(Protocol):
    """Draws what words become."""

    def draw(self, words: list[bytes], keys: np.ndarray) -> Ragged:
        """Other pieces of each word: a function of the word and its key, (words,) uint64."""
        ...


class Sampler:
    """Draws rows of one tokenizer's pieces."""

    def __init__(self, tokenizer: Tokenizer, kind: str, strength: float) -> None:
        """`strength` is the probability that a merge is left out (bpe), or the power of probabilities (unigram)."""
        self._words = Words(tokenizer)
        self._draw: Draw = BpeDropout(self._words, strength) if kind == "bpe" else Sampling(self._words, strength)

    def rows(self, rows: Ragged, keys: np.ndarray) -> Ragged:
        """Other pieces of each row that spell the same: a function of the row and its key, (rows,) uint64."""
        words, counts = self._words.of(rows)
        starts = np.cumsum(counts) - counts
        places = np.arange(len(words)) - np.repeat(starts, counts)
        drawn = self._draw.draw(words, mixed(np.repeat(keys, counts) + places.astype(np.uint64)))
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(drawn.lengths, dtype=np.int64)])
        return Ragged(drawn.flat, (before[starts + counts] - before[starts]).astype(np.int32))


class Resegmentation:
    """What the settings of a training ask for, for both sides of its text."""

    def __init__(self, tokenizers: Tokenizers, kind: str, strength: float, *, longest: int, seed: int) -> None:
        """A row that would have more than `longest` pieces on a side, end mark counted, keeps that side as it is."""
        self._source = Sampler(tokenizers.source, kind, strength)
        same = tokenizers.source.processor is tokenizers.target.processor
        self._target = self._source if same else Sampler(tokenizers.target, kind, strength)
        self._longest, self._seed = longest, seed

    def of(self, side: Side, rows: np.ndarray, copies: np.ndarray, *, epoch: int) -> Side:
        """These rows of a side in other pieces.

        `copies`, (rows,): how often each came before in this epoch; a row that comes twice is drawn twice.
        """
        sides = ((self._source, side.source), (self._target, side.target))
        drawn = []
        for end, (sampler, tokens) in enumerate(sides):
            (base,) = np.random.SeedSequence((self._seed, epoch, 2, end)).generate_state(1, np.uint64)
            keys = mixed(mixed(base + rows.astype(np.uint64)) + copies.astype(np.uint64))
            drawn.append(self._tokens(sampler, tokens, rows, keys))
        return side.drawn(rows, *drawn)

    def _tokens(self, sampler: Sampler, tokens: Tokens, rows: np.ndarray, keys: np.ndarray) -> Tokens:
        plain = tokens.taken(rows)
        drawn = sampler.rows(plain, keys)
        fits = drawn.lengths < self._longest
        ends = [np.cumsum(each.lengths, dtype=np.int64) - each.lengths for each in (drawn, plain)]
        return Tokens(
            # one element at least: padding is gathered from some place
            np.concatenate([drawn.flat, plain.flat, np.zeros(1, dtype=np.int32)]),
            np.where(fits, ends[0], len(drawn.flat) + ends[1]),
            np.where(fits, drawn.lengths, plain.lengths),
        )


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
