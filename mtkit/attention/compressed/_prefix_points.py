"""Two attentions, one above the other, at every prefix: points read the tokens up to each, which reads the points.

What a point has read up to token t enters the second attention as one row of all heads. These rows are never formed.
Positions lie in blocks. Over the prefix of t, the softmax of a point has one weight for all that lies before the block
of t, whose mean is kept, and one for each token of the block up to t. A score of the second attention, and what it
reads, are sums over heads of products with those means and of products with the block's values: the first take most of
the time, and are of all rows of a block at once. The backward pass computes everything again, part by part.
"""

import torch
from torch import Tensor

from mtkit.attention.engines.softmax.dot_product import widened
from mtkit.attention.engines.softmax.dropout import seeded_dropout
from mtkit.attention.engines.sums.recurrence import Part, recur

BLOCK = 8
CHUNK = 64


def read_points(
    q: Tensor, k: Tensor, v: Tensor, points: Tensor, keys: Tensor, values: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """The heads' outputs (B, G, T, W) of queries (B, G, T, K), in float32 at least; queries and points are scaled.

    points (H, m, K) ask the tokens, k (B, H, T, K) and v (B, H, T, V). The maps keys (G, K, H, V) and values
    (G, W, H, V) are of each head of the queries, from the row of a point, which is of all H heads.
    """
    seed = int(torch.randint(1 << 31, ())) if dropout else 0

    def step(
        part: Part, sequences: list[Tensor], constants: list[Tensor], state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        points, keys, values = (widened(x).squeeze(0) for x in constants)
        queries, k, v = (_in_blocks(widened(x).squeeze(0)) for x in sequences)
        scores = torch.einsum("bhlck,hmk->bhlcm", k, points)
        log_before, before, after = _before_blocks(scores, v, *state)
        share, weights = _within_blocks(scores, log_before)
        # a query for each head of the row, and all queries of a block together
        asks = torch.einsum("bglck,gkhv->bhlcgv", queries, keys)
        rows, summaries = asks.shape[3:5], torch.cat([before, v], 3)  # (B, H, L, m + c, V)
        products = (asks.flatten(3, 4) @ summaries.mT).unflatten(3, rows)
        earlier, inside = products.split([before.shape[3], rows[0]], -1)
        inside = inside.permute(0, 2, 3, 4, 5, 1).flatten(4)  # (B, L, c, G, c H)
        noise = seeded_dropout(dropout, seed + part.positions.start, q.device)
        answers = noise(((earlier * share).sum(1) + inside @ weights).softmax(-1))  # (B, L, c, G, m)
        inside = (answers @ weights.mT).unflatten(4, (rows[0], -1)).permute(0, 5, 1, 2, 3, 4)
        read = torch.cat([answers.unsqueeze(1) * share, inside], -1).flatten(3, 4) @ summaries  # (B, H, L, c G, V)
        heads = torch.einsum("bhlcgv,gwhv->bglcw", read.unflatten(3, rows), values).flatten(2, 3)
        return heads[:, :, : sequences[0].shape[-2]].unsqueeze(0), [] if part.whole else after

    # all segments are one stream, as they share the maps
    like, shape = widened(v), (1, *v.shape[:2], 1, points.shape[1])
    nothing = [like.new_full(shape, torch.finfo(like.dtype).min), like.new_zeros(*shape, v.shape[-1])]
    sequences, constants = ([x.unsqueeze(0) for x in each] for each in ((q, k, v), (points, keys, values)))
    heads, _ = recur(step, sequences, nothing, constants=constants, chunk=CHUNK)
    return heads.squeeze(0)


def _before_blocks(scores: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The softmax over all before each block: its log-sum (B, H, L, m) and mean (B, H, L, m, V); the state after.

    scores (B, H, L, c, m), v (B, H, L, c, V); the state before, log_sum (1, B, H, 1, m) and mean (1, B, H, 1, m, V).
    """
    log_sums = torch.cat([log_sum.squeeze(0), scores.logsumexp(3)], 2)
    means = torch.cat([mean.squeeze(0), scores.softmax(3).mT @ v], 2)
    parts = _up_to_each(log_sums.unsqueeze(2), 1)  # (B, H, L + 1, L + 1, m)
    log_sums, means = parts.logsumexp(3), torch.einsum("bhilm,bhlmv->bhimv", parts.softmax(3), means)
    after = [x[:, :, -1:].unsqueeze(0) for x in (log_sums, means)]
    return log_sums[:, :, :-1], means[:, :, :-1], after


def _within_blocks(scores: Tensor, log_before: Tensor) -> tuple[Tensor, Tensor]:
    """Weights at each position: of all before its block, (B, H, L, c, 1, m), and of the block's, (B, L, c, c H, m)."""
    own = _up_to_each(scores.permute(0, 2, 3, 1, 4).unsqueeze(2), 2)  # (B, L, c, c, H, m)
    before = log_before.transpose(1, 2)[:, :, None, None].expand(-1, -1, own.shape[2], -1, -1, -1)
    share, weights = torch.cat([before, own], 3).softmax(3).split([1, own.shape[3]], 3)
    return share.permute(0, 4, 1, 2, 3, 5), weights.flatten(3, 4)


def _up_to_each(scores: Tensor, trailing: int) -> Tensor:
    """Scores (..., 1, n, ...), with `trailing` axes behind, as (..., n, n, ...): row i has those up to i."""
    count = scores.shape[-1 - trailing]
    earlier = torch.ones(count, count, dtype=torch.bool, device=scores.device).tril()
    return scores.where(earlier.view(count, count, *[1] * trailing), float("-inf"))


def _in_blocks(x: Tensor) -> Tensor:
    """(B, H, T, X) as (B, H, L, c, X), with zeros behind the last position."""
    missing = -x.shape[2] % BLOCK
    padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    return padded.unflatten(2, (-1, BLOCK))
