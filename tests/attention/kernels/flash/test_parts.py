"""The CPU's flash kernel over keys in parts against one softmax over all keys, and its memory."""

from functools import partial

import pytest
import torch
from torch import Tensor

from mtkit.attention.kernels.flash.parts import KernelRows, Laid, LaidPart, attend_parts, can_fuse
from mtkit.attention.kernels.pattern import Band, Blocks, Comb, Pattern
from mtkit.attention.kernels.sparse import dense_attend, sparse_attend, visible_pairs
from tests.contract.counting import count


def test_parts_are_one_softmax_also_where_one_or_all_show_nothing() -> None:
    q, k, v = (torch.randn(2, 3, size, 4, dtype=torch.float64, requires_grad=True) for size in (7, 9, 9))
    visible = torch.rand(2, 1, 7, 9) < 0.5
    visible[:, :, 0, :5] = False
    visible[:, :, 1] = False
    visible[:, :, 2, 5:] = False

    def lay(some: slice, q: Tensor, k: Tensor, v: Tensor) -> Laid:
        rows = KernelRows(q, k[:, :, some], v[:, :, some], visible[..., some])
        return Laid([rows], join_blocks=lambda rows: rows[0], split_blocks=lambda x: [x])

    heads = attend_parts(q, k, v, [LaidPart(partial(lay, some)) for some in (slice(5), slice(5, 9))], scale=0.5)
    wanted, _ = dense_attend(q, k, v, visible, 0.5)
    assert heads[:, :, 1].abs().max() == 0
    weight = torch.randn_like(heads)
    both = [(x, *torch.autograd.grad((x * weight).sum(), [q, k, v])) for x in (heads, wanted)]
    torch.testing.assert_close(both[0], both[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("pattern", [Band(8, 8) | Band(None, None, 32), Blocks(32) | Comb(32, 28, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_scores_of_a_part_lie_in_memory(pattern: Pattern, causal: bool) -> None:
    q, k, v = (torch.randn(1, 8, 1024, 8, requires_grad=True) for _ in range(3))

    def run(dropout: float) -> int:
        return count(
            lambda: sparse_attend(q, k, v, pattern, scale=0.3, causal=causal, dropout=dropout)[0].sum().backward()
        )[0].largest

    scores = 8 * 1024 * 32  # of each head and query over the keys of the smaller part
    assert run(0.0) < scores <= run(0.1)


def test_values_of_another_width_are_for_the_other_engine() -> None:
    q = torch.zeros(1, 1, 2, 4)
    assert can_fuse(q, q)
    assert not can_fuse(q, torch.zeros(1, 1, 2, 5))


@pytest.mark.parametrize("pattern", [Band(3, 3) | Band(None, None, 8), Blocks(8) | Comb(8, 7, 1)])
def test_a_part_that_shows_a_query_nothing_gives_it_no_gradient_however_large_scores_are(pattern: Pattern) -> None:
    """The part's keys are the future, whose scores may be beyond those that the query sees by more than exp holds."""
    q, k, v = (torch.randn(1, 2, 64, 8).requires_grad_() for _ in range(3))
    i = torch.arange(64)
    visible = visible_pairs(pattern.sees(i.unsqueeze(-1), i), True, None)
    weight = torch.randn(1, 2, 64, 8)
    ours, wanted = (
        torch.autograd.grad((heads * weight).sum(), [q, k, v])
        for heads, _ in (
            sparse_attend(q, k, v, pattern, scale=50.0, causal=True),
            dense_attend(q, k, v, visible, 50.0),
        )
    )
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-3)
