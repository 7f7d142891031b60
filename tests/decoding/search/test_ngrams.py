"""Forbidden repeats, against a loop."""

import pytest
import torch

from mtkit.decoding.search.ngrams import forbid_repeats


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 12])
def test_forbids_what_would_complete_a_known_sequence_and_nothing_else(size: int, length: int) -> None:
    pieces = torch.randint(4, 7, (5, 3, length))
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
