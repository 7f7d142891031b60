"""Decayed sums in chunks against the matrices of the recurrence, written out, at weak and at strong decays."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.linear._chunk_decays import LOWEST
from mtkit.attention.linear._chunked_sums import NUMBERS_AT_ONCE
from mtkit.attention.linear._decayed_sums import (
    Terms,
    read_both_ways,
    read_causal,
    read_literally,
    read_next,
    sums_after,
)

WIDTHS = {"head": 1, "channel": 6}
CHUNKS = [1, 3, 7, 8, 64]


def terms(length: int, kind: str = "head", *, delta: bool = False, strength: float = 1.0) -> Terms:
    def drawn(width: int) -> Tensor:
        return torch.randn(2, 3, length, width, dtype=torch.float64)

    decay = -strength * torch.rand(2, 3, length, WIDTHS[kind], dtype=torch.float64)
    beta = 2 * torch.rand(2, 3, length, 1, dtype=torch.float64) if delta else None
    return Terms(drawn(6), F.normalize(drawn(6), dim=-1), drawn(5), decay, beta)


def written_out(x: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """Reads with the token, reads without it, and the last sums, from S_t = (I - beta k k^T) A S_t-1 + beta k v^T."""
    sums, reads, without = torch.zeros(2, 3, 6, 5, dtype=torch.float64), [], []
    for t in range(x.k.shape[2]):
        q, k, v, decay = (part[:, :, t] for part in x[:4])
        beta = torch.ones_like(v[..., :1]) if x.beta is None else x.beta[:, :, t]
        kept = torch.diag_embed(decay.exp().expand_as(k)) @ sums
        transition = torch.eye(6, dtype=torch.float64)
        if x.beta is not None:
            transition = transition - beta.unsqueeze(-1) * k.unsqueeze(-1) @ k.unsqueeze(-2)
        sums = transition @ kept + (beta * k).unsqueeze(-1) @ v.unsqueeze(-2)
        reads.append((sums.mT @ q.unsqueeze(-1)).squeeze(-1))
        without.append((kept.mT @ q.unsqueeze(-1)).squeeze(-1))
    return torch.stack(reads, 2), torch.stack(without, 2), sums


def flipped(x: Terms) -> Terms:
    return Terms(*(None if part is None else part.flip(2) for part in x))


def parts(x: Terms) -> list[Tensor]:
    return [part for part in x if part is not None]


def needing_gradients(x: Terms) -> Terms:
    return Terms(*(None if part is None else part.requires_grad_() for part in x))


@pytest.mark.parametrize("strength", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("length", [1, 2, 7, 23, 53])
def test_chunks_are_the_recurrence(length: int, kind: str, delta: bool, strength: float) -> None:
    ahead, back = (needing_gradients(terms(length, kind, delta=delta, strength=strength)) for _ in range(2))
    reads, _, last = written_out(ahead)
    both = reads + written_out(flipped(back))[1].flip(2)
    for chunk in CHUNKS:
        torch.testing.assert_close(read_causal(ahead, chunk), reads, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(sums_after(ahead, chunk), last, rtol=1e-11, atol=1e-11)
        got = read_both_ways(ahead, back, chunk)
        torch.testing.assert_close(got, both, rtol=1e-11, atol=1e-11)
        inputs, weight = parts(ahead) + parts(back), torch.randn_like(got)
        gradients, wanted = (
            torch.autograd.grad(
                (x * weight).sum(), inputs, allow_unused=True, materialize_grads=True, retain_graph=True
            )
            for x in (got, both)
        )
        for one, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("kind", WIDTHS)
@torch.no_grad()
def test_steps_and_the_literal_form_are_the_recurrence(kind: str, delta: bool) -> None:
    x = terms(9, kind, delta=delta)
    reads, without, last = written_out(x)
    torch.testing.assert_close(read_literally(x)[0], reads)
    torch.testing.assert_close(read_literally(x)[1], last)
    torch.testing.assert_close(read_literally(x, excluding=True)[0], without)
    sums = torch.zeros_like(last)
    for t in range(9):
        token = Terms(*(None if part is None else part[:, :, t : t + 1] for part in x))
        torch.testing.assert_close(read_next(token, sums), reads[:, :, t : t + 1])
    torch.testing.assert_close(sums, last)


@pytest.mark.parametrize("kind", WIDTHS)
@torch.no_grad()
def test_a_constant_decay_weighs_both_sides_by_the_distance_and_none_is_the_plain_sum(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = terms(23, kind)
    distance = (torch.arange(23)[:, None] - torch.arange(23)).abs().double()
    monkeypatch.setitem(NUMBERS_AT_ONCE, "cpu", 300)
    for gamma in (0.9, 1.0):
        same = x._replace(decay=torch.tensor(gamma, dtype=torch.float64).log().expand_as(x.decay))
        wanted = (x.q @ x.k.mT * gamma**distance) @ x.v
        torch.testing.assert_close(read_both_ways(same, same, 7), wanted)
        torch.testing.assert_close(read_causal(same, 7), (x.q @ x.k.mT * gamma**distance).tril() @ x.v)
        torch.testing.assert_close(sums_after(same, 7), (x.k * gamma ** distance[:, -1:]).mT @ x.v)


@pytest.mark.parametrize("delta", [False, True])
def test_equal_channels_are_a_head(delta: bool) -> None:
    x = terms(40, delta=delta, strength=3.0)
    wide = x._replace(decay=x.decay.expand(-1, -1, -1, 6))
    torch.testing.assert_close(read_both_ways(wide, wide, 16), read_both_ways(x, x, 16))


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("lowest", [LOWEST, -1e30, -torch.inf])
@torch.no_grad()
def test_a_decay_of_zero_forgets_all_before_it_and_nothing_after(kind: str, delta: bool, lowest: float) -> None:
    """In float32: what stands next to a large sum of logarithms keeps its own."""
    x = Terms(*(None if part is None else part.float() for part in terms(40, kind, delta=delta, strength=0.01)))
    x.decay[:, :, 9] = lowest
    after = Terms(*(None if part is None else part[:, :, 9:] for part in x))
    wanted = read_literally(after)[0]
    for chunk in (4, 16, 64):
        torch.testing.assert_close(read_causal(x, chunk)[:, :, 9:], wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("kind", WIDTHS)
def test_strong_decays_in_float32_have_finite_gradients(kind: str, delta: bool) -> None:
    """exp(-L) overflows after 19 tokens of decay 0.01."""
    x = Terms(*(None if part is None else part.float() for part in terms(70, kind, delta=delta)))
    x = needing_gradients(x._replace(decay=torch.full_like(x.decay, 0.01).log()))
    output = read_both_ways(x, x, 64)
    torch.testing.assert_close(output, read_both_ways(x, x, 5), rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(output.square().sum(), parts(x))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("read", [read_causal, lambda x, chunk: read_both_ways(x, x, chunk), sums_after])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("kind", WIDTHS)
@torch.no_grad()
def test_padding_neither_writes_nor_decays(read: Callable[[Terms, int], Tensor], kind: str, delta: bool) -> None:
    x = terms(12, kind, delta=delta)
    valid = torch.arange(12).expand(2, 12) < 9
    x.decay[:, :, 9:] = -5.0
    real = Terms(*(None if part is None else part[:, :, :9] for part in x))
    output, wanted = read(x.masked(valid), 5), read(real, 5)
    torch.testing.assert_close(output[:, :, : wanted.shape[2]], wanted)


@pytest.mark.parametrize("at_once", [1, 500, 1 << 30])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("kind", WIDTHS)
def test_parts_of_segments_and_chunks_do_not_matter(
    kind: str, delta: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = needing_gradients(terms(23, kind, delta=delta))
    wanted = read_both_ways(x, x, 4)
    weight = torch.randn_like(wanted)
    gradients = torch.autograd.grad((wanted * weight).sum(), parts(x))
    monkeypatch.setitem(NUMBERS_AT_ONCE, "cpu", at_once)
    got = read_both_ways(x, x, 4)
    torch.testing.assert_close(got, wanted)
    for one, other in zip(torch.autograd.grad((got * weight).sum(), parts(x)), gradients, strict=True):
        torch.testing.assert_close(one, other)
