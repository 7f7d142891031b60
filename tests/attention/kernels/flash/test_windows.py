"""Windows of keys by the CPU's flash kernel, a few blocks at a time, against one softmax over all keys."""

import pytest
import torch

from mtkit.attention.kernels.flash import windows
from mtkit.attention.kernels.pattern import Band, Columns, Flanked, Pattern
from mtkit.attention.kernels.sparse import dense_attend, sparse_attend, visible_pairs
from tests.contract.counting import count


@pytest.mark.parametrize(
    "pattern", [Band(9, 20), Band(5, 5) | Columns(3), Flanked(16, 4, 4), Band(3, 3, 3) | Columns(2)]
)
@pytest.mark.parametrize("rows", [1, 200, 800])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_of_any_size_are_one_softmax(
    pattern: Pattern, rows: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer heads for keys, and a segment of which later queries see padding alone."""
    monkeypatch.setattr(windows, "ROWS_AT_ONCE", rows)
    q, k, v = (torch.randn(2, heads, 103, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    valid = None if causal else torch.arange(103) < torch.tensor([[103], [41]])
    heads, _ = sparse_attend(q, k, v, pattern, scale=0.5, causal=causal, valid=valid)
    i = torch.arange(103)
    visible = visible_pairs(pattern.sees(i.unsqueeze(-1), i), causal, valid)
    wanted, _ = dense_attend(q, k, v, visible, 0.5)
    weight = torch.randn_like(heads)
    both = [(x, *torch.autograd.grad((x * weight).sum(), [q, k, v])) for x in (heads, wanted)]
    torch.testing.assert_close(both[0], both[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("pattern", [Band(64, 64), Band(64, 64) | Columns(8)])
def test_no_window_of_all_keys_lies_in_memory(pattern: Pattern) -> None:
    q, k, v = (torch.randn(1, 8, 4096, 8, requires_grad=True) for _ in range(3))
    counted = count(lambda: sparse_attend(q, k, v, pattern, scale=0.3)[0].sum().backward())[0]
    assert counted.largest < 1.5 * k.numel()


def test_bfloat16_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "ROWS_AT_ONCE", 200)
    low = [torch.randn(2, 4, 103, 8).bfloat16().requires_grad_() for _ in range(3)]
    whole = [x.detach().float().requires_grad_() for x in low]
    for q, k, v in (low, whole):
        sparse_attend(q, k, v, Band(5, 5) | Columns(3), scale=0.3)[0].float().square().sum().backward()
    for one, other in zip(low, whole, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.float(), other.grad, atol=0.05, rtol=0.05)
