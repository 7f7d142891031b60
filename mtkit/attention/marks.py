"""Marks: one integer per token, the number of its sentence in a document and whether it is a separator.

mark = 2 * sentence + separator. A break piece is a separator and opens the sentence after it, so that the decoder's
query at a break, which predicts the first piece of the next sentence, belongs to that sentence. Sentence numbers never
decrease along a sequence. Marks at padding are arbitrary. None means that all marks are 0.
"""

from torch import Tensor


def marks_from(breaks: Tensor) -> Tensor:
    """Return the marks, int64, of sequences whose tokens are breaks or not, (..., T)."""
    return marks_of(breaks.long().cumsum(-1), breaks)


def marks_of(sentence: Tensor, separator: Tensor) -> Tensor:
    """Return the marks of tokens with these sentence numbers, which are separators or not."""
    return 2 * sentence + separator


def sentences(marks: Tensor) -> Tensor:
    """Return the number of each token's sentence, in the shape of the marks."""
    return marks >> 1


def separators(marks: Tensor) -> Tensor:
    """Return which tokens are separators, in the shape of the marks."""
    return (marks & 1).bool()
