"""The training side, resampled each epoch: documents joined into other rows, words cut into other pieces.

If all rows of documents are as long as the budget allows, a model hardly begins to learn which source words a target
word translates: Bao et al., "G-Transformer for Document-level Machine Translation", ACL 2021, arXiv 2105.14761. Trained
on rows of several lengths, single segments among them, it learns that from the short ones, and context from the long
ones: Sun et al., "Rethinking Document-level Neural Machine Translation", Findings of ACL 2022, arXiv 2010.08961.
"""

import numpy as np

from mtkit.data.columns import Tokens
from mtkit.data.prepared import Side
from mtkit.errors import RecipeError
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.sampling import BpeDropout, UnigramSampling, Words
from mtkit.text.segments import Ragged, mix
from mtkit.text.tokenizer import Tokenizer, Tokenizers


def join_documents(side: Side, pieces: int, *, seed: int, epoch: int, whole: bool = False) -> Side:
    """Join neighbouring segments of documents into an epoch's rows of up to `pieces` pieces a side, with breaks.

    Breaks and tags are counted; a longer segment is a row of its own. Each row's room is drawn, from the mean segment
    length to `pieces`, such that each doubling of the room gets the same share of the text; with `whole`, it is
    `pieces`, so that a document that fits is one row. Every segment is in one row; a pure function of the arguments.
    Nothing is copied: a row is a stretch of the prepared side, which contains the breaks. A side without `documents` is
    returned as it is.
    """
    if side.documents is None:
        return side
    random = np.random.default_rng((seed, epoch, 1))  # differs from the generator that shuffles the epoch
    mean = max(1.0, *(float(tokens.lengths.mean()) for tokens in (side.source, side.target)))
    # a row of room r holds r pieces: with a density of 1 / r^2, rows of room r to 2 r hold as much text at any r
    drawn = 1 / random.uniform(1 / pieces, max(1 / mean, 1 / pieces), len(side))
    room = np.full(len(side), pieces) if whole else drawn
    ends = np.minimum(_row_ends(side.source, room), _row_ends(side.target, room))
    ends = np.minimum(ends, _document_ends(side, side.documents))
    following, firsts, first = np.maximum(ends, np.arange(1, len(side) + 1)).tolist(), [], 0
    while first < len(following):
        firsts.append(first)
        first = following[first]
    rows = np.array(firsts, dtype=np.int64)
    lasts = np.append(rows[1:], len(side)) - 1
    return side.with_tokens(rows, side.source.spans(rows, lasts), side.target.spans(rows, lasts))


def _row_ends(tokens: Tokens, room: np.ndarray) -> np.ndarray:
    """Return, for each segment, the end of a row that begins with it and has that room."""
    after = np.cumsum(tokens.lengths + np.int64(1))  # where the next segment begins, breaks counted
    return np.searchsorted(after, after - tokens.lengths + room, side="right")


def _document_ends(side: Side, documents: np.ndarray) -> np.ndarray:
    """Return, for each segment, the next one that cannot be in its row.

    A row ends with the document, and with the record batch of the file: two batches are not one stretch.
    """
    together = (documents[1:] == documents[:-1]) & side.source.adjoining & side.target.adjoining
    ends = np.append(np.flatnonzero(~together) + 1, len(documents))
    return np.repeat(ends, np.diff(ends, prepend=0))


class Sampler:
    """Draws rows of one tokenizer's pieces."""

    def __init__(self, tokenizer: Tokenizer, kind: str, strength: float) -> None:
        """`strength` is the probability that a merge is dropped (bpe), or the power of probabilities (unigram)."""
        self._words = Words(tokenizer)
        method = BpeDropout if kind == "bpe" else UnigramSampling
        self._method: BpeDropout | UnigramSampling = method(self._words, strength)

    def rows(self, rows: Ragged, keys: np.ndarray) -> Ragged:
        """Draw other pieces of each row with the same text: a function of the row and its key, (rows,) uint64."""
        words, counts = self._words.split(rows)
        starts = np.cumsum(counts) - counts
        places = np.arange(len(words)) - np.repeat(starts, counts)
        drawn = self._method.draw(words, mix(np.repeat(keys, counts) + places.astype(np.uint64)))
        sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(drawn.lengths, dtype=np.int64)])
        return Ragged(drawn.flat, (sums[starts + counts] - sums[starts]).astype(np.int32))


class Resegmentation:
    """Subword sampling of both sides of the training text."""

    def __init__(self, tokenizers: Tokenizers, kind: str, strength: float, *, longest: int, seed: int) -> None:
        """A row keeps a side that would have more than `longest` pieces, end mark counted."""
        self._source = Sampler(tokenizers.source, kind, strength)
        same = tokenizers.source.processor is tokenizers.target.processor
        self._target = self._source if same else Sampler(tokenizers.target, kind, strength)
        self._longest, self._seed = longest, seed

    def of(
        self, side: Side, rows: np.ndarray, copies: np.ndarray, *, epoch: int, places: np.ndarray | None = None
    ) -> Side:
        """Draw other pieces of these rows: a pure function of seed, epoch, row, copy and side.

        `copies`, (rows,): how often each came before in this epoch; a row that comes twice is drawn twice. `places`,
        (rows,): the indices of the rows in `side`, if it is not the training side.
        """
        places = rows if places is None else places
        drawn = []
        for end, (sampler, tokens) in enumerate(((self._source, side.source), (self._target, side.target))):
            (base,) = np.random.SeedSequence((self._seed, epoch, 2, end)).generate_state(1, np.uint64)
            keys = mix(mix(base + rows.astype(np.uint64)) + copies.astype(np.uint64))
            drawn.append(self._draw(sampler, tokens, places, keys))
        return side.with_tokens(places, *drawn)

    def _draw(self, sampler: Sampler, tokens: Tokens, rows: np.ndarray, keys: np.ndarray) -> Tokens:
        rest = tokens.take(rows)
        drawn = sampler.rows(rest, keys)
        fits = drawn.lengths < self._longest
        return Tokens(
            # at least one element: padding is gathered from some place
            np.concatenate([drawn.flat, rest.flat, np.zeros(1, dtype=np.int32)]),
            np.where(fits, drawn.starts, len(drawn.flat) + rest.starts),
            np.where(fits, drawn.lengths, rest.lengths),
        )


def sampling_strength(tokenizer: TokenizerSettings, *, dropout: float, alpha: float) -> float:
    """Return the strength of subword sampling, 0 for none: `dropout` for bpe, `alpha` for unigram.

    Raises: RecipeError if the setting of the other kind is given, or either for words, which have one segmentation.
    """
    names = {"bpe": ("subword_dropout", "subword_alpha"), "unigram": ("subword_alpha", "subword_dropout")}
    strengths = {"subword_dropout": dropout, "subword_alpha": alpha}
    if tokenizer.kind == "words":
        if given := [name for name, strength in strengths.items() if strength]:
            raise RecipeError(
                f"training.{given[0]} = {strengths[given[0]]} does not go with a words tokenizer; leave it out"
            )
        return 0.0
    name, other = names[tokenizer.kind]
    if strengths[other]:
        raise RecipeError(
            f"training.{other} = {strengths[other]} does not go with a {tokenizer.kind} tokenizer; set training.{name}"
        )
    return strengths[name]
