"""Length and coverage penalties, by hand."""

import math

import pytest
import torch

from mtkit.decoding.search.continuations import coverage_penalty, normalised


def test_length_penalty_divides_by_a_power_of_the_length() -> None:
    log_probs, lengths = torch.tensor([[-6.0, -8.0]]), torch.tensor([[1, 4]])
    assert normalised(log_probs, lengths, 0.0).tolist() == [[-6.0, -8.0]]
    assert normalised(log_probs, lengths, 1.0).tolist() == [[-6.0, -2.0]]
    assert normalised(log_probs, lengths, 0.5).tolist() == [[-6.0, -4.0]]


def test_coverage_counts_real_source_pieces_up_to_one() -> None:
    attention = torch.tensor([[[0.5, 2.0, 0.25, 0.0]], [[0.0, 1.0, 1.0, 1.0]]])
    valid = torch.tensor([[True, True, True, False], [True, True, True, True]])
    found = coverage_penalty(attention, valid, 0.2)
    assert found[0, 0].item() == pytest.approx(0.2 * (math.log(0.5) + math.log(0.25)), rel=1e-6)
    assert math.isfinite(found[1, 0].item())
    assert found[1, 0].item() < -1
