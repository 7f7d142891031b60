"""Compiled loops of decayed sums and of the delta rule, in float32, against the recurrence in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.linear import _looped_sums
from mtkit.attention.linear._chunked_corrections import corrected_reads
from mtkit.attention.linear._chunked_sums import decayed_reads
from mtkit.attention.linear._decayed_sums import Terms, read_literally
from mtkit.training.flops import flops_of


def drawn(length: int, strength: float = 1.0) -> list[Tensor]:
    """Queries, keys, values, decays and beta (2, 3, length, ...), the heads side by side in memory."""
    q, k, v, decay, beta = (torch.randn(2, length, 3, width).transpose(1, 2) for width in (6, 6, 9, 1, 1))
    return [q, F.normalize(k, dim=-1), v, -strength * decay.abs(), 2 * beta.sigmoid()]


def literal(way: bool, terms: list[Tensor]) -> Tensor:
    if not way:
        return read_literally(Terms(*terms))[0]
    return read_literally(Terms(*(x.flip(2) for x in terms)), excluding=True)[0].flip(2)


@pytest.mark.parametrize("way", [False, True])
@pytest.mark.parametrize("strength", [0.0, 1e-2, 1.0, 60.0])
@pytest.mark.parametrize(("length", "chunk"), [(1, 32), (7, 3), (32, 8), (45, 32), (45, 64)])
@pytest.mark.parametrize("threads", [1, 2, 9])
@pytest.mark.parametrize("delta", [False, True])
def test_outputs_and_gradients_are_those_of_the_recurrence(
    way: bool, strength: float, length: int, chunk: int, threads: int, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    terms = [x.requires_grad_() for x in drawn(length, strength)][: 5 if delta else 4]
    exact = [x.detach().double().requires_grad_() for x in terms]
    assert _looped_sums.loops_sum(chunk, *terms[1:], terms[0])
    found = corrected_reads(way, chunk, *terms) if delta else decayed_reads((way,), chunk, *terms)
    wanted = literal(way, exact)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)
    d_outputs = torch.randn_like(found)
    gradients = torch.autograd.grad(found, terms, d_outputs)
    wanted_gradients = torch.autograd.grad(wanted, exact, d_outputs.double(), allow_unused=True, materialize_grads=True)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-4, atol=2e-4)


def test_a_damaged_segment_does_not_reach_another() -> None:
    terms = [x.requires_grad_() for x in drawn(20)]
    wanted = torch.autograd.grad(corrected_reads(False, 8, *terms)[1].sum(), terms)
    with torch.no_grad():
        terms[2][0, :, 5] = torch.nan
        terms[1][0, :, 9] = torch.inf
    outputs = corrected_reads(False, 8, *terms)
    assert outputs[0].isnan().any()
    assert outputs[1].isfinite().all()
    found = torch.autograd.grad(outputs[1].sum(), terms)
    assert all(torch.equal(x[1], y[1]) for x, y in zip(found, wanted, strict=True))


def test_counted_operations_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = drawn(20)
    counted = flops_of(lambda: corrected_reads(False, 8, *terms))
    monkeypatch.setattr(_looped_sums, "loops_take", lambda *_: False)
    assert counted == flops_of(lambda: corrected_reads(False, 8, *terms)) > 0
