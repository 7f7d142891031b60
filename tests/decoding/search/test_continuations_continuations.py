"""The best continuations against a stable sort of all log-probabilities."""

from functools import partial

import pytest
import torch
from torch import Tensor

from mtkit.decoding.search.continuations import NEVER_GENERATED, best_continuations, forbid_repeats
from mtkit.model import network as module
from mtkit.model.network import Logits
from mtkit.text.tokenizer import EOS


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
        found, hypothesis, piece = best_continuations(Logits.known(logits.clone()), before, 10, ends, forbid)
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
    found, hypothesis, piece = best_continuations(Logits(hidden, project, 100), before, 4, ends)
    real = found > -torch.inf
    torch.testing.assert_close(found.double()[real], whole[0][real], rtol=1e-6, atol=2e-6)
    assert torch.equal((hypothesis * 100 + piece)[real], whole[1][real])
    assert sizes == {1: [1] * 7, 6: [3, 3, 1], 7: [3, 3, 1], 100: [7]}[together]
