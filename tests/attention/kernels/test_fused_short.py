"""Attention over few keys in bfloat16: near the same in float64, forward and backward, whatever hides keys."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.kernels import fused
from mtkit.attention.kernels.fused import fused_attention, short_attention


def inputs(queries: int, keys: int, width: int = 32) -> list[Tensor]:
    """Rounded queries, keys and values of 3 segments and 2 heads, laid out as projections give them."""
    made = [torch.randn(3, length, 2, width).transpose(1, 2) for length in (queries, keys, keys)]
    return [x.bfloat16().requires_grad_() for x in made]


def results(heads: Tensor, given: list[Tensor], weight: Tensor) -> list[Tensor]:
    return [heads, *torch.autograd.grad(heads, given, weight.bfloat16().type_as(heads))]


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() < 0.01 * other.double().norm()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (7, 5), (16, 16), (17, 33), (40, 90)])
@pytest.mark.parametrize("hidden", ["nothing", "keys", "pairs", "numbers"])
def test_it_is_near_what_float64_gives(queries: int, keys: int, hidden: str) -> None:
    given, weight = inputs(queries, keys), torch.randn(3, 2, queries, 32)
    mask: Tensor | None = None
    if hidden == "keys":
        mask = torch.arange(keys) < torch.tensor([keys, 1, keys // 2 + 1]).view(3, 1, 1, 1)
    elif hidden == "pairs":
        mask = torch.rand(3, 1, queries, keys) < 0.5
        mask[..., 0] = True
    elif hidden == "numbers":
        mask = torch.randn(1, 2, queries, keys)
    exact = [x.detach().double().requires_grad_() for x in given]
    other = mask if mask is None or mask.dtype == torch.bool else mask.double()
    expected = F.scaled_dot_product_attention(*exact, attn_mask=other, scale=0.3)
    found = short_attention(*given, scale=0.3, mask=mask, dropout=0.0, is_causal=False)
    # with one key weights are constant: the gradients of queries and keys are zero, and here what rounding left of them
    counted = slice(None) if keys > 1 and hidden != "keys" else slice(0, 4, 3)
    check(results(found, given, weight)[counted], results(expected, exact, weight)[counted])


@pytest.mark.parametrize("length", [2, 15, 16, 50])
def test_causal_queries_see_what_came_before(length: int) -> None:
    given, weight = inputs(length, length), torch.randn(3, 2, length, 32)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = F.scaled_dot_product_attention(*exact, is_causal=True, scale=0.3)
    found = short_attention(*given, scale=0.3, mask=None, dropout=0.0, is_causal=True)
    check(results(found, given, weight), results(expected, exact, weight))


@pytest.mark.parametrize("keys", [3, 20])
def test_it_keeps_rows_of_real_keys_and_the_weights_once(keys: int) -> None:
    kept = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        short_attention(*inputs(7, keys), scale=0.3, mask=None, dropout=0.0, is_causal=False)
    rows, weights = 3 * 2 * (7 + 2 * keys) * 32, 3 * 2 * 7 * max(keys, fused.LEAST)
    assert sum(x.untyped_storage().nbytes() for x in kept) == 2 * rows + 4 * weights


def test_no_segment_is_no_row() -> None:
    given = [x[:0] for x in inputs(3, 20)]
    assert short_attention(*given, scale=1.0, mask=None, dropout=0.0, is_causal=False).shape == (0, 2, 3, 32)


def test_dropout_keeps_its_share_and_has_the_gradients_of_what_it_kept() -> None:
    """Values are the identity, so that the outputs are the weights that were applied."""
    q, k, _ = inputs(32, 32)
    v = torch.eye(32).expand(3, 2, 32, 32).bfloat16().requires_grad_()
    weight = torch.randn(3, 2, 32, 32)
    found = results(short_attention(q, k, v, scale=0.3, mask=None, dropout=0.4, is_causal=False), [q, k, v], weight)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    weights = (exact[0] @ exact[1].mT * 0.3).softmax(-1)
    kept = (found[0] != 0).double()
    assert 0.56 < kept.mean() < 0.64
    check(found, results((weights * kept / 0.6) @ exact[2], exact, weight))


@pytest.mark.parametrize(("keys", "short"), [(128, True), (129, False)])
def test_few_keys_take_it_and_more_do_not(keys: int, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[bool]()
    monkeypatch.setattr(fused, "has_low_products", lambda: True)
    monkeypatch.setattr(fused, "short_attention", lambda q, *_, **__: taken.append(True) or q)
    q, k, v = inputs(4, keys)
    fused_attention(q, k, v, scale=1.0)
    fused_attention(q.float(), k.float(), v.float(), scale=1.0)
    learned = torch.zeros(1, 1, 4, keys, dtype=torch.bfloat16, requires_grad=True)
    fused_attention(q, k, v, scale=1.0, mask=learned).sum().backward()
    assert learned.grad is not None
    assert taken == [True] * short
