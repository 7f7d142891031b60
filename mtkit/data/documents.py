"""Joining the segments of documents into rows of many lengths, other ones each epoch.

Where all rows are as long as the budget allows, a model hardly begins to learn which source words a target word stands
for: Bao et al., "G-Transformer for Document-level Machine Translation", ACL 2021, arXiv 2105.14761. Trained on rows of
several lengths, single segments among them, it learns that from the short ones, and context from the long ones: Sun et
al., "Rethinking Document-level Neural Machine Translation", Findings of ACL 2022, arXiv 2010.08961.
"""

import numpy as np

from mtkit.data.prepared import Side, Tokens


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
