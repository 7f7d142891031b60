"""Forbidden repeats, against a loop."""

import pytest
import torch

from mtkit.decoding.search.continuations import forbid_repeats
from mtkit.text.tokenizer import BREAK


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_line_may_say_what_another_line_of_its_document_has_said(size: int) -> None:
    for begun in range(5):
        alone = torch.tensor([5, 6, 7, 5][:begun], dtype=torch.long)
        joined = torch.cat([torch.tensor([5, 6, 5, 6, BREAK, 5, 6, 7, 5, BREAK]), alone])
        scores, expected = torch.zeros(1, 1, 9), torch.zeros(1, 1, 9)
        forbid_repeats(scores, joined.view(1, 1, -1), size)
        forbid_repeats(expected, alone.view(1, 1, -1), size)
        assert torch.equal(scores, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 12])
def test_forbids_what_would_complete_a_known_sequence_and_nothing_else(size: int, length: int) -> None:
    pieces = torch.randint(5, 8, (5, 3, length))
    scores = torch.zeros(5, 3, 8)
    forbid_repeats(scores, pieces, size)
    for row in range(5):
        for hypothesis in range(3):
            history = pieces[row, hypothesis].tolist()
            seen = {tuple(history[start : start + size]) for start in range(length - size + 1)}
            for piece in range(8):
                begins = history[length - size + 1 :] if size > 1 else []
                repeated = len(begins) == size - 1 and (*begins, piece) in seen
                assert (scores[row, hypothesis, piece] == -torch.inf) == repeated
