"""Absolute positions against their formulas, and embeddings step by step."""

import math

import pytest
import torch

from mtkit.model.embedding import Embedding, Sinusoidal, absolute_positions, token_table


@pytest.mark.parametrize("width", [8, 7, 2])
@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal-halves", "sinusoidal-cat"])
def test_sinusoids_are_the_formula(kind: str, width: int) -> None:
    table = Sinusoidal(50, width, kind).table
    expected = torch.zeros(50, width)
    pairs = width // 2
    for p in range(50):
        for i in range(pairs):
            angle = p * 10_000 ** (-2 * i / width)
            if kind == "sinusoidal-cat":
                angle = p * math.exp(-i * math.log(10_000) / (pairs - 1 if pairs > 1 else 1))
            places = (2 * i, 2 * i + 1) if kind == "sinusoidal" else (i, pairs + i)
            expected[p, places[0]], expected[p, places[1]] = math.sin(angle), math.cos(angle)
    torch.testing.assert_close(table, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal-halves", "sinusoidal-cat", "learned", "none"])
@pytest.mark.parametrize("concatenated", [False, True])
def test_one_token_at_a_time_is_the_whole(kind: str, concatenated: bool) -> None:
    positions = absolute_positions(kind, 9, 3 if concatenated else 6)
    embedding = Embedding(token_table(11, 6), positions, dropout=0.5, concatenated=concatenated).eval()
    ids = torch.randint(11, (2, 9))
    whole = embedding(ids)
    assert whole.shape[2] == (9 if concatenated and kind != "none" else 6)
    for position in range(9):
        assert torch.equal(embedding.at(ids[:, position : position + 1], position)[:, 0], whole[:, position])


def test_scaled_vectors_have_unit_variance() -> None:
    embedding = Embedding(token_table(2_000, 64), None, dropout=0.0)
    assert embedding(torch.arange(2_000)[None]).var().item() == pytest.approx(1.0, abs=0.02)
