"""Joining the segments of documents into rows of many lengths, other ones each epoch.

Where all rows are as long as the budget allows, a model hardly begins to learn which source words a target word stands
for: Bao et al., "G-Transformer for Document-level Machine Translation", ACL 2021, arXiv 2105.14761. Trained on rows of
several lengths, single segments among them, it learns that from the short ones, and context from the long ones: Sun et
al., "Rethinking Document-level Neural Machine Translation", Findings of ACL 2022, arXiv 2010.08961.

The training side in other pieces: a row's are a function of the training's seed, the epoch, the row and the side.
"""

from typing import Protocol

import numpy as np

from mtkit.data.columns import Tokens
from mtkit.data.prepared import Side
from mtkit.errors import RecipeError
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.sampling import BpeDropout, UnigramSampling, Words
from mtkit.text.segments import Ragged, mixed
from mtkit.text.tokenizer import Tokenizer, Tokenizers


def joined(side: Side, pieces: int, *, seed: int, epoch: int) -> Side:
    """The rows of an epoch: neighbouring segments of a document with breaks between them, up to `pieces` a side.

    Breaks and tags are counted; a segment that is longer by itself is a row of its own. How much room each row has is
    drawn, from that of a segment of mean length to `pieces`, such that each doubling of the room gets the same share of
    the text. Every segment is in one row; a pure function of the arguments. Nothing is copied: a row is a stretch of
    the prepared side, which has the breaks. A side whose segments are to stay alone (its `documents` are None) is given
    back as it is.
    """
    if side.documents is None:
        return side
    random = np.random.default_rng((seed, epoch, 1))  # other numbers than those that shuffle the epoch
    mean = max(1.0, *(float(tokens.lengths.mean()) for tokens in (side.source, side.target)))
    # a row of room r takes in r pieces: with a density of 1 / r^2, rows of room r to 2 r take in as much at any r
    room = 1 / random.uniform(1 / pieces, max(1 / mean, 1 / pieces), len(side))
    ends = np.minimum(_reach(side.source, room), _reach(side.target, room))
    ends = np.minimum(ends, _document_ends(side, side.documents))
    firsts = _firsts(np.maximum(ends, np.arange(1, len(side) + 1)))
    lasts = np.append(firsts[1:], len(side)) - 1
    return Side(
        side.source.spans(firsts, lasts),
        side.target.spans(firsts, lasts),
        side.lines[firsts],
        None,
        None,
        None if side.tasks is None else side.tasks[firsts],
        None if side.corpora is None else side.corpora[firsts],
        side.documents[firsts],
    )


def _reach(tokens: Tokens, room: np.ndarray) -> np.ndarray:
    """For each segment, the one before which a row that begins there and has so much room ends."""
    after = np.cumsum(tokens.lengths + np.int64(1))  # where the next begins, breaks counted
    return np.searchsorted(after, after - tokens.lengths + room, side="right")


def _document_ends(side: Side, documents: np.ndarray) -> np.ndarray:
    """For each segment, the first one behind it that cannot be in its row.

    That is where a document ends, or a record batch of the file: what lies in two is not one stretch.
    """
    together = (documents[1:] == documents[:-1]) & side.source.adjoining & side.target.adjoining
    ends = np.append(np.flatnonzero(~together) + 1, len(documents))
    return np.repeat(ends, np.diff(ends, prepend=0))


def _firsts(ends: np.ndarray) -> np.ndarray:
    """The first segment of each row: the first of all, and where one ends, the next."""
    following, firsts, first = ends.tolist(), [], 0
    while first < len(following):
        firsts.append(first)
        first = following[first]
    return np.array(firsts, dtype=np.int64)


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
        self._draw: Draw = (
            BpeDropout(self._words, strength) if kind == "bpe" else UnigramSampling(self._words, strength)
        )

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
