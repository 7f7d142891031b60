"""Tokens sorted by bucket: who lies beside whom, in which round, and where each is found again."""

import pytest
import torch

from mtkit.attention.content._sorted_chunks import SortedChunks, sorted_chunks
from mtkit.attention.kernels.windowed_rows import NOTHING_SEEN, stream_rows

LENGTH, ROUNDS = 23, 3


def shown_pairs(layout: SortedChunks, rows: int) -> list[tuple[int, int]]:
    """The rows of each query and key that it sees, in order of places."""
    count = (len(layout.keys) - layout.width) // layout.block + 1
    scores = torch.randn(count, layout.block, layout.width)
    hidden = scores.clone()
    layout.hide(hidden, slice(0, count))
    assert ((hidden == scores) | (hidden < NOTHING_SEEN)).all()
    windows = layout.keys.unfold(0, layout.width, layout.block)
    seen = (hidden == scores).nonzero().tolist()
    pairs = [(int(windows[block, layout.before + i]), int(windows[block, j])) for block, i, j in seen]
    return [pair for pair in pairs if pair[0] < rows]


@pytest.mark.parametrize("chunk", [3, 4, 40])
@pytest.mark.parametrize(("across", "causal"), [(True, False), (False, False), (False, True)])
def test_each_pair_is_shown_once_and_only_near_ones(across: bool, causal: bool, chunk: int) -> None:
    buckets = torch.randint(3, (2, 1, ROUNDS, LENGTH))
    valid = torch.arange(LENGTH) < torch.tensor([[LENGTH], [17]])
    buckets = buckets.masked_fill(~valid[:, None, None], 3)
    shown = torch.zeros(2, LENGTH, LENGTH, dtype=torch.long)
    near = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    for each, layout in enumerate(sorted_chunks(buckets, valid, chunk, across, causal)):
        for i, j in shown_pairs(layout, 2 * LENGTH):
            assert i // LENGTH == j // LENGTH, "of the same stream"
            shown[i // LENGTH, i % LENGTH, j % LENGTH] += 1
        for n in range(2):
            near[n] |= pairs(buckets[n, 0, each], valid[n], across, causal, chunk)
    real = valid.unsqueeze(-1).expand_as(near)
    assert torch.equal(shown[real], near.long()[real])


def pairs(buckets: torch.Tensor, valid: torch.Tensor, across: bool, causal: bool, chunk: int) -> torch.Tensor:
    """(T, T): the same, from each token's rank."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    same = buckets[:, None] == buckets
    rank = (same & (j < i)).sum(-1)
    if across:
        rank = rank + (buckets[:, None] > buckets).sum(-1)
    back = rank[:, None] // chunk - rank // chunk
    seen = ((back == 0) | (back == 1)) & (same | across) & valid
    return seen & (j < i if causal else j != i)


def test_every_row_is_found_at_its_place() -> None:
    buckets = torch.randint(4, (2, 3, 2, LENGTH))
    for layout in sorted_chunks(buckets, None, 4, False, True):
        rows = stream_rows((2, LENGTH, 3), buckets.device)
        assert torch.equal(layout.keys[layout.before + layout.place], rows)
        assert (layout.keys == rows.numel()).sum() == len(layout.keys) - rows.numel()
