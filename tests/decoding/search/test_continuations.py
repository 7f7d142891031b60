"""Best continuations, penalties and forbidden repeats, against loops and stable sorts."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from mtkit.decoding.search.continuations import (
    NEVER_GENERATED,
    best,
    best_continuations,
    best_sums,
    coverage_penalty,
    forbid_repeats,
    normalised,
)
from mtkit.decoding.search.endings import ANY, Endings
from mtkit.model import network as module
from mtkit.model.network import Logits
from mtkit.text.tokenizer import BREAK, EOS


def expected(logits: Tensor, before: Tensor, k: int, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """All sums in float64, sorted; hypotheses with NaN have none."""
    log_probs = logits.double() - logits.double().logsumexp(2, keepdim=True)
    log_probs[..., :NEVER_GENERATED] = -torch.inf
    for segment in range(len(logits)):
        if ends is not None and ends[segment]:
            kept = log_probs[segment, :, EOS].clone()
            log_probs[segment] = -torch.inf
            log_probs[segment, :, EOS] = kept
    sums = (log_probs + before[..., None]).nan_to_num(nan=-torch.inf, neginf=-torch.inf).flatten(1)
    ranked = sums.sort(dim=1, descending=True, stable=True)
    return ranked.values[:, :k], ranked.indices[:, :k]


def at(ends: Tensor | None, hypotheses: int) -> Endings | None:
    """The endings of segments that are at their limit if `ends` (B,)."""
    if ends is None:
        return None
    must = ends[:, None].expand(-1, hypotheses)
    return Endings(torch.full(must.shape, ANY), must)


@pytest.mark.parametrize("forbids", [False, True])  # what forbids more takes the other way, as GPUs do
@pytest.mark.parametrize("pieces", [5, 64, 100, 5003])
@pytest.mark.parametrize("hypotheses", [1, 4])
@pytest.mark.parametrize("kinds", [2, 10**6])
def test_they_are_the_first_of_all(pieces: int, hypotheses: int, kinds: int, forbids: bool) -> None:
    """`kinds` different logits: with two of them nearly everything is a tie."""
    logits = torch.randint(kinds, (7, hypotheses, pieces)) * (10.0 / kinds)
    before = -torch.arange(hypotheses).expand(7, -1) * 0.5
    logits[5, 0, pieces // 2] = torch.nan
    before = before.clone()
    before[6, 0] = -torch.inf
    for ends in (None, torch.arange(7) % 2 == 0):
        wanted, places = expected(logits, before, 10, ends)
        forbid = (lambda log_probs: None) if forbids else None
        found, hypothesis, piece = best_continuations(
            Logits.known(logits.clone()), before, 10, at(ends, hypotheses), forbid
        )
        index = hypothesis * pieces + piece
        assert found.shape == index.shape == (7, min(10, hypotheses * pieces))
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=2e-6)
        real = found > -torch.inf
        # sums of several hypotheses that are equal in float64 may differ in float32: then places change, sums do not
        assert hypotheses > 1 or torch.equal(index[real], places[real])
        there = expected(logits, before, hypotheses * pieces, ends)
        by_place = torch.empty_like(there[0]).scatter_(1, there[1], there[0])
        torch.testing.assert_close(by_place.gather(1, index)[real], wanted[real], rtol=1e-6, atol=2e-6)
        assert torch.equal(index[real] % pieces >= NEVER_GENERATED, torch.ones_like(index[real], dtype=torch.bool))


def test_further_pieces_may_be_forbidden() -> None:
    logits, before = torch.zeros(1, 1, 8), torch.zeros(1, 1)
    logits[0, 0, 6], logits[0, 0, 5] = 3.0, 2.0
    forbid = partial(forbid_repeats, pieces=torch.tensor([[[7, 6, 7]]]), size=2)
    assert best_continuations(Logits.known(logits.clone()), before, 1, None, forbid)[2].tolist() == [[5]]
    assert best_continuations(Logits.known(logits), before, 1, None)[2].tolist() == [[6]]


@pytest.mark.parametrize("together", [1, 6, 7, 100])  # two hypotheses a segment: one segment at a time, three, all
def test_they_are_the_same_whatever_is_computed_at_a_time(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", together)
    hidden, weight, before = torch.randn(7, 2, 16), torch.randn(100, 16), torch.randn(7, 2)
    sizes: list[int] = []

    def project(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return rows @ weight.T

    ends = torch.arange(7) % 3 == 0
    whole = expected(hidden @ weight.T, before, 4, ends)
    found, hypothesis, piece = best_continuations(Logits(hidden, project, 100), before, 4, at(ends, 2))
    real = found > -torch.inf
    torch.testing.assert_close(found.double()[real], whole[0][real], rtol=1e-6, atol=2e-6)
    assert torch.equal((hypothesis * 100 + piece)[real], whole[1][real])
    assert sizes == {1: [1] * 7, 6: [3, 3, 1], 7: [3, 3, 1], 100: [7]}[together]


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


@pytest.mark.parametrize("count", [7, 64, 640, 641, 5000, 5003])
@pytest.mark.parametrize("k", [1, 2, 10])
@pytest.mark.parametrize("kinds", [3, 40, 10**6])
def test_the_first_k_of_a_stable_sort(count: int, k: int, kinds: int) -> None:
    """`kinds` different values: with 3 of them nearly everything is a tie."""
    values = torch.randint(kinds, (6, count)).float()
    values[1] = -torch.inf
    values[2, : count - 1] = -torch.inf
    values[3, count // 2 :] = -torch.inf
    expected = values.sort(dim=1, descending=True, stable=True)
    found, indices = best(values, k)
    assert torch.equal(found, expected.values[:, :k])
    assert torch.equal(indices, expected.indices[:, :k])


@pytest.mark.parametrize("count", [7, 64, 100, 5003])
@pytest.mark.parametrize("k", [1, 2, 10])
@pytest.mark.parametrize("kinds", [3, 10**6])
def test_the_first_k_of_the_sums(count: int, k: int, kinds: int) -> None:
    values, before = torch.randint(kinds, (6, 3, count)).float(), torch.randint(3, (6, 3)).float()
    values[1], before[2, 1:] = -torch.inf, -torch.inf
    values[3, 1] = torch.nan  # as the log-probabilities of a hypothesis for which the model gives no number
    sums = (values + before[..., None]).nan_to_num(nan=-torch.inf, neginf=-torch.inf).flatten(1)
    expected = sums.sort(dim=1, descending=True, stable=True)
    found, indices = best_sums(values, before, k)
    assert torch.equal(found, expected.values[:, :k])
    real = found > -torch.inf
    assert torch.equal(indices[real], expected.indices[:, :k][real])


def test_no_more_than_there_are() -> None:
    found, indices = best_sums(torch.randn(2, 2, 3), torch.zeros(2, 2), 10)
    assert found.shape == indices.shape == (2, 6)
    assert indices.sort(1).values.tolist() == [list(range(6))] * 2
