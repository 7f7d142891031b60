"""Tokens sorted by bucket: who lies beside whom, in which round, and back again in order."""

import pytest
import torch

from mtkit.attention.sorted_chunks import sorted_chunks

LENGTH, CHUNK, ROUNDS = 23, 3, 3


@pytest.mark.parametrize(("across", "causal"), [(True, False), (False, False), (False, True)])
def test_each_pair_is_shown_once_and_only_near_ones(across: bool, causal: bool) -> None:
    buckets = torch.randint(3, (2, 1, ROUNDS, LENGTH))
    valid = torch.arange(LENGTH) < torch.tensor([[LENGTH], [17]])
    buckets = buckets.masked_fill(~valid[:, None, None], 3)
    shown = torch.zeros(2, LENGTH, LENGTH, dtype=torch.long)
    near = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    position = torch.arange(LENGTH).expand(2, -1).unsqueeze(-1)
    for each, layout in enumerate(sorted_chunks(buckets, valid, CHUNK, across, causal)):
        blocks, keys = layout.blocks(position).squeeze(-1), layout.windows(position).squeeze(-1)
        hidden = layout.hidden((slice(None), slice(None)))
        for n, block, i, j in (hidden == 0).nonzero().tolist():
            if block * layout.block + i < LENGTH:  # a row of its own
                shown[n, blocks[n, block, i], keys[n, block * layout.block + j]] += 1
        for n in range(2):
            near[n] |= pairs(buckets[n, 0, each], valid[n], across, causal)
    real = valid.unsqueeze(-1).expand_as(near)
    assert torch.equal(shown[real], near.long()[real])


def pairs(buckets: torch.Tensor, valid: torch.Tensor, across: bool, causal: bool) -> torch.Tensor:
    """(T, T): the same, from each token's rank."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    same = buckets[:, None] == buckets
    rank = (same & (j < i)).sum(-1)
    if across:
        rank = rank + (buckets[:, None] > buckets).sum(-1)
    back = rank[:, None] // CHUNK - rank // CHUNK
    seen = ((back == 0) | (back == 1)) & (same | across) & valid
    return seen & (j < i if causal else j != i)


def test_sorted_rows_come_back_and_so_do_their_gradients() -> None:
    buckets = torch.randint(4, (1, 2, 1, LENGTH))
    (layout,) = sorted_chunks(buckets, None, CHUNK, False, True)
    x = torch.randn(2, LENGTH, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(layout.unsorted(layout.blocks(x)), x)
    assert torch.autograd.gradcheck(lambda x: layout.unsorted(layout.blocks(x).square()), x)
