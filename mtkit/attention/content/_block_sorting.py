"""The base of the Sinkhorn mechanisms: a learned soft order of key blocks, and block rows mixed by its weights.

Block n covers positions n * size to (n + 1) * size - 1; the last block may be shorter. Weights (B, H, P, N) are nearly
a permutation: row p mixes the N blocks into the block at place p.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import ROLES, Site, State
from mtkit.attention.kernels.dot_product import expand_heads, safe_softmax, scores_of, upcast, weighted
from mtkit.attention.kernels.reproducible import hashed, random_key
from mtkit.attention.options import root_of_length
from mtkit.errors import MtkitError

HIDDEN = -1e30
"""Log of what is not there: finite, so that sums of nothing but such entries have no NaN."""
LEAST = 1e-6
"""Share of a slot below which nothing is there."""


def order_weights(scores: Tensor, visible: Tensor | None, iterations: int, *, causal: bool) -> Tensor:
    """The weights (B, H, N, N), in float32 at least, of scores (B, H, N, N), None visible meaning all.

    Each iteration divides the exponentials by their sums over rows, then over columns; at last rows are divided again.
    If `causal`, the sum of a column that row n is divided by is that of rows 0 to n. A row that sees nothing is zero.
    """

    def shown(x: Tensor) -> Tensor:
        return x if visible is None else x.where(visible, HIDDEN)

    logs = shown(upcast(scores))
    for _ in range(iterations):
        logs = shown(logs - logs.logsumexp(-1, keepdim=True))
        logs = shown(logs - (logs.logcumsumexp(-2) if causal else logs.logsumexp(-2, keepdim=True)))
    return safe_softmax(logs, visible)


def next_order_weights(scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """One more row of causal `order_weights`: its weights (B, H, N) from scores (B, H, N), and the columns after it.

    The columns (B, H, iterations, N - 1) are the logs of the sums over the rows before, in each iteration.
    """
    logs, after = upcast(scores), []
    for before in F.pad(columns, (0, 1), value=HIDDEN).unbind(2):
        logs = logs - logs.logsumexp(-1, keepdim=True)
        after.append(torch.logaddexp(before, logs))
        logs = logs - after[-1]
    return logs.softmax(-1), torch.stack(after, 2) if after else columns


def block_rows(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """The rows (B, G, N, size, V) of each block of x (B, G, T, V), zero behind the end and where not valid (B, T)."""
    if valid is not None:
        x = x.masked_fill(~valid[:, None, :, None], 0.0)
    fill = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, fill)) if fill else x).unflatten(2, (-1, size))


def block_sums(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """The sum (B, G, N, V) over each block, in float32 at least."""
    return upcast(block_rows(x, size, valid)).sum(-2)


def block_means(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """The mean (B, G, N, V) over the real rows of each block, in float32 at least; zero if there are none."""
    there = x.new_ones(1, x.shape[2], dtype=torch.bool) if valid is None else valid
    return block_sums(x, size, valid) / block_sums(upcast(there[:, None, :, None].type_as(x)), size).clamp(min=1)


def sums_to_blocks(x: Tensor, size: int) -> Tensor:
    """The sum (B, G, N, V) over all positions up to the first of each block, itself included."""
    rows = upcast(block_rows(x, size))
    # the blocks before, not all less the own one, which would leave rounding
    before = F.pad(rows[:, :, :-1].sum(-2).cumsum(2), (0, 0, 1, 0))
    return before + rows[..., 0, :]


def sorted_rows(weights: Tensor, x: Tensor, size: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The blocks (B, H, P, size, V) that `weights` mix from x (B, G, T, V), slot by slot over the blocks that have it.

    The mask (B, H, P, size) of slots that any block with a weight has; None where all have all.
    """
    mixed = weighted(weights, block_rows(x, size, valid).flatten(3)).unflatten(3, (size, -1))
    if valid is None and x.shape[2] % size == 0:
        return mixed, None
    there = x.new_ones(1, x.shape[2], dtype=torch.bool) if valid is None else valid
    slots = block_rows(there[:, None, :, None].type_as(weights), size).squeeze(-1)  # (B or 1, 1, N, size)
    with torch.autocast(x.device.type, enabled=False):
        share = weights @ slots
    return (mixed / share.clamp(min=LEAST).unsqueeze(-1)).type_as(mixed), share >= LEAST


SORTNET = ("attn", "mlp")


class BlockSorting(HeadAttention):
    """Attention that sorts blocks of keys.

    With sinkhorn_sortnet=attn a block is scored, for a place, by the product of its mean key with the mean query of the
    block that is there; with sinkhorn_sortnet=mlp by two layers on the sum of the tokens that are there, which have an
    output for each block up to the maximum length.
    """

    updates: Tensor

    def __init__(self, site: Site, block: int | None, iterations: int | None, temperature: float, sortnet: str) -> None:
        super().__init__(site)
        self.block, self.temperature = root_of_length(block, site), temperature
        self.iterations = (0 if site.causal else 8) if iterations is None else iterations
        self.learned = sortnet == "mlp"
        if self.learned:
            cross = site.role == "cross"
            self.longest = (site.memory_length if cross else None) or site.max_length
            width = (site.memory_width if cross else None) or site.d_model
            self.block_proj = nn.Linear(width, width)
            self.place_proj = nn.Linear(width, site.heads * -(-self.longest // self.block))
        self.key = random_key(site.seed, ROLES.index(site.role), site.layer)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def order(self, tokens: Tensor, q: Tensor, k: Tensor, valid: Tensor | None, size: int) -> Tensor:
        """The weights (B, H, N, N) of source blocks for each place, from tokens (B, T, D), q and k (B, H or G, T, K).

        Blocks are of `size` tokens, `block` or the whole length.

        In the decoder place n takes earlier blocks alone, and its scores are of what precedes it, and of its first
        token.
        """
        causal = self.site.causal
        if self.longest is not None and tokens.shape[1] > self.longest:
            raise MtkitError(
                f"sinkhorn_sortnet=mlp was built for {self.longest} positions, not {tokens.shape[1]}: "
                "raise model.max_length"
            )
        if self.learned:
            x = tokens.unsqueeze(1)
            sums = sums_to_blocks(x, size) if causal else block_sums(x, size, valid)
            scores = self.learned_scores(sums.squeeze(1), sums.shape[2])
        else:
            means = sums_to_blocks(q, size) if causal else block_means(q, size, valid)
            if causal:
                means = means / (torch.arange(means.shape[2], device=q.device) * size + 1).unsqueeze(-1)
            scores = self.scores(means, block_means(k, size, valid))
        count = scores.shape[2]
        number, visible = torch.arange(count, device=scores.device), None
        if causal:
            visible = number < number.unsqueeze(-1)
        elif valid is not None:
            real = valid[:, None, ::size]
            visible = real.unsqueeze(-1) & real.unsqueeze(-2)
        if self.training:
            scores = scores + self._gumbel(number)
        return order_weights(scores / self.temperature, visible, self.iterations, causal=causal)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scaled products (B, H, P, N) of mean queries (B, H or G, P, K) and mean keys (B, G, N, K)."""
        with torch.autocast(queries.device.type, enabled=False):
            return scores_of(expand_heads(queries, self.site.heads), keys, self.scale)

    def learned_scores(self, sums: Tensor, blocks: int) -> Tensor:
        """The scores (B, H, P, N) of the first `blocks` from sums of tokens (B, P, D)."""
        scores = F.relu(self.place_proj(F.relu(self.block_proj(sums))))
        return upcast(scores).unflatten(-1, (self.site.heads, -1))[..., :blocks].transpose(1, 2)

    def start_order(self, batch_size: int, hypotheses: int) -> State:
        """Before the first token: no sums, no blocks."""
        p, like = self.projection, upcast(self.q_proj.weight)
        leading = batch_size, hypotheses
        sums = like.new_zeros(*leading, *((self.site.d_model,) if self.learned else (p.heads, p.key_width)))
        state = {"sums": sums, "columns": like.new_zeros(*leading, p.heads, self.iterations, 0), "count": 0}
        return state if self.learned else {**state, "means": like.new_zeros(*leading, p.key_heads, 0, p.key_width)}

    def next_token(self, state: State, token: Tensor, q: Tensor) -> State:
        """The state with the newest token (B, N, D) and its queries (B, N, H, K) in the sum."""
        return {**state, "sums": state["sums"] + upcast(token if self.learned else q), "count": state["count"] + 1}

    def next_block(self, state: State, keys: Tensor) -> tuple[Tensor, State]:
        """The weights (B*N, H, 1, N) of the block that the newest token begins; keys (B*N, G, t, K) of those before."""
        leading, blocks = state["sums"].shape[:2], keys.shape[2] // self.block
        sums = state["sums"].flatten(0, 1)
        if self.learned:
            scores = self.learned_scores(sums.unsqueeze(1), blocks)
        else:
            newest = upcast(keys[:, :, -self.block :]).mean(2, keepdim=True).unflatten(0, leading)
            state = {**state, "means": torch.cat([state["means"], newest], dim=3)}
            means = (sums / state["count"]).unsqueeze(2)
            scores = self.scores(means, state["means"].flatten(0, 1))
        columns = state["columns"].flatten(0, 1)
        weights, columns = next_order_weights((scores / self.temperature).squeeze(2), columns)
        return weights.unsqueeze(2), {**state, "columns": columns.unflatten(0, leading)}

    def naive_sorted(
        self, tokens: Tensor, q: Tensor, k: Tensor, v: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The slots of all sorted blocks: keys and values (B, H, N b, K), and which of them are there (B, H, N b).

        From matrices over all tokens, real (B, T): means over blocks, exponentials divided by their sums, and mixtures.
        """
        at, heads, causal = torch.arange(tokens.shape[1], device=tokens.device), self.site.heads, self.site.causal
        places = torch.arange(-(-len(at) // self.block), device=at.device).unsqueeze(-1)
        of_block = (at // self.block == places) & real.unsqueeze(1)  # (B, N, T)
        asking = ((at <= places * self.block) if causal else of_block).expand_as(of_block).type_as(q)
        if self.learned:
            scores = F.relu(self.place_proj(F.relu(self.block_proj(asking @ tokens))))
            scores = scores.unflatten(-1, (heads, -1))[..., : len(places)].transpose(1, 2)
        else:
            mean_q, mean_k = (x / x.sum(-1, keepdim=True).clamp(min=1) for x in (asking, of_block.type_as(q)))
            mean_q, mean_k = mean_q.unsqueeze(1) @ expand_heads(q, heads), mean_k.unsqueeze(1) @ expand_heads(k, heads)
            scores = mean_q @ mean_k.transpose(-1, -2) * self.scale
        there = of_block.any(-1).unsqueeze(1)  # (B, 1, N)
        seen = (places > places.T) if causal else there.unsqueeze(-1) & there.unsqueeze(-2)
        weights = torch.exp(scores / self.temperature) * seen
        for _ in range(self.iterations):
            weights = weights / weights.sum(-1, keepdim=True).where(seen, 1)
            weights = weights / (weights.cumsum(-2) if causal else weights.sum(-2, keepdim=True)).where(seen, 1)
        weights = weights / weights.sum(-1, keepdim=True).where(seen, 1)
        slot = torch.arange(self.block, device=at.device).unsqueeze(-1)
        of_slot = (at % self.block == slot) & real[:, None, None]  # (B, 1, b, T)
        mixing = (weights @ of_block.unsqueeze(1).type_as(q)).unsqueeze(-2) * of_slot.unsqueeze(1)  # (B, H, N, b, T)
        mixing = mixing.flatten(2, 3)
        share = mixing.sum(-1, keepdim=True)
        mixing = mixing / share.where(share >= LEAST, 1)
        return mixing @ expand_heads(k, heads), mixing @ expand_heads(v, heads), (share >= LEAST).squeeze(-1)

    def after_update(self, update: int, total_updates: int) -> None:
        """Other noise for the next update."""
        super().after_update(update, total_updates)
        self.updates.fill_(update)

    def _gumbel(self, number: Tensor) -> Tensor:
        """Gumbel noise (H, N, N), a function of seed, role, layer, update, head and both blocks."""
        head = torch.arange(self.site.heads, device=number.device).view(-1, 1, 1)
        bits = hashed(hashed(hashed(hashed(self.updates + self.key) + head) + number.unsqueeze(-1)) + number)
        uniform = ((bits >> 9) + 0.5) / 2**23  # float32 holds it, and it is neither 0 nor 1
        return -(-uniform.log()).log()
