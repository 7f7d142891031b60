"""Marks: a break opens the sentence after it, and is a separator."""

import torch

from mtkit.attention.marks import marks_from, sentences, separators


def test_a_break_belongs_to_the_sentence_that_it_opens() -> None:
    breaks = torch.tensor([[0, 0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]]).bool()
    marks = marks_from(breaks)
    assert marks.dtype == torch.long
    assert marks.tolist() == [[0, 0, 3, 2, 5, 7, 6], [0] * 7]
    assert sentences(marks).tolist() == [[0, 0, 1, 1, 2, 3, 3], [0] * 7]
    assert torch.equal(separators(marks), breaks)
