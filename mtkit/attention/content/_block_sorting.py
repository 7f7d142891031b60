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
"""Logarithm of a hidden entry: finite, so that sums of only hidden entries are not NaN."""
LEAST = 1e-6
"""Weight of a slot below which it counts as empty."""


def order_weights(scores: Tensor, visible: Tensor | None, iterations: int, *, causal: bool) -> Tensor:
    """Return the weights (B, H, N, N) of scores (B, H, N, N), in float32 or wider; visible None means all.

    Each iteration divides the exponentials by their sums over rows, then over columns; the last step divides rows
    again. If `causal`, row n is divided by column sums over rows 0 to n. A row that sees nothing is zero.
    """

    def hide(x: Tensor) -> Tensor:
        return x if visible is None else x.where(visible, HIDDEN)

    logs = hide(upcast(scores))
    for _ in range(iterations):
        logs = hide(logs - logs.logsumexp(-1, keepdim=True))
        logs = hide(logs - (logs.logcumsumexp(-2) if causal else logs.logsumexp(-2, keepdim=True)))
    return safe_softmax(logs, visible)


def next_order_weights(scores: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next row (B, H, N) of causal `order_weights` from its scores (B, H, N), and the updated columns.

    The columns (B, H, iterations, N - 1) are the logarithms of the sums over earlier rows, in each iteration.
    """
    logs, after = upcast(scores), []
    for earlier in F.pad(columns, (0, 1), value=HIDDEN).unbind(2):
        logs = logs - logs.logsumexp(-1, keepdim=True)
        after.append(torch.logaddexp(earlier, logs))
        logs = logs - after[-1]
    return logs.softmax(-1), torch.stack(after, 2) if after else columns


def block_rows(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """Split x (B, G, T, V) into blocks (B, G, N, size, V), with zeros for padding (B, T) and after the end."""
    if valid is not None:
        x = x.masked_fill(~valid[:, None, :, None], 0.0)
    fill = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, fill)) if fill else x).unflatten(2, (-1, size))


def block_sums(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """Return the sum (B, G, N, V) of each block, in float32 or wider."""
    return upcast(block_rows(x, size, valid)).sum(-2)


def block_means(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """Return the mean (B, G, N, V) of each block's real rows, in float32 or wider; zero if there are none."""
    real = x.new_ones(1, x.shape[2], dtype=torch.bool) if valid is None else valid
    return block_sums(x, size, valid) / block_sums(upcast(real[:, None, :, None].type_as(x)), size).clamp(min=1)


def sums_to_blocks(x: Tensor, size: int) -> Tensor:
    """Return the sums (B, G, N, V) over all positions up to and including the first of each block."""
    rows = upcast(block_rows(x, size))
    # sums of earlier blocks: subtracting the own block from all would leave rounding errors
    earlier = F.pad(rows[:, :, :-1].sum(-2).cumsum(2), (0, 0, 1, 0))
    return earlier + rows[..., 0, :]


def sorted_rows(weights: Tensor, x: Tensor, size: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Mix the blocks of x (B, G, T, V) by `weights` into (B, H, P, size, V).

    Each slot is averaged over the blocks that have it. The mask (B, H, P, size) is False for slots that no weighted
    block has; None means that all slots are filled.
    """
    mixed = weighted(weights, block_rows(x, size, valid).flatten(3)).unflatten(3, (size, -1))
    if valid is None and x.shape[2] % size == 0:
        return mixed, None
    real = x.new_ones(1, x.shape[2], dtype=torch.bool) if valid is None else valid
    slots = block_rows(real[:, None, :, None].type_as(weights), size).squeeze(-1)  # (B or 1, 1, N, size)
    with torch.autocast(x.device.type, enabled=False):
        share = weights @ slots
    return (mixed / share.clamp(min=LEAST).unsqueeze(-1)).type_as(mixed), share >= LEAST


SORTNET = ("attn", "mlp")


class BlockSorting(HeadAttention):
    """Attention that sorts blocks of keys.

    sinkhorn_sortnet=attn scores a block for a place by the product of its mean key and the mean query of the block at
    that place. sinkhorn_sortnet=mlp applies two layers to the sum of the tokens at that place; they have an output for
    each block up to the maximum length.
    """

    sequential_operations = "O(1)"
    longest_path = "O(1)"  # a sorted block is a mixture of all blocks

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
        """Return weights (B, H, N, N) of source blocks for each place.

        It takes tokens (B, T, D), q and k (B, H or G, T, K). Blocks have `size` tokens: `block` or the full length. In
        the decoder place n takes only earlier blocks, and its scores depend on the tokens up to its first one. Raises:
        MtkitError if an mlp was built for fewer positions.
        """
        causal = self.site.causal
        self._check_length(tokens.shape[1])
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
        """Return scaled products (B, H, P, N) of mean queries (B, H or G, P, K) and mean keys (B, G, N, K)."""
        with torch.autocast(queries.device.type, enabled=False):
            return scores_of(expand_heads(queries, self.site.heads), keys, self.scale)

    def learned_scores(self, sums: Tensor, blocks: int) -> Tensor:
        """Return the scores (B, H, P, N) of the first `blocks` from sums of tokens (B, P, D)."""
        scores = F.relu(self.place_proj(F.relu(self.block_proj(sums.type_as(self.block_proj.weight)))))
        return upcast(scores).unflatten(-1, (self.site.heads, -1))[..., :blocks].transpose(1, 2)

    def start_order(self, batch_size: int, hypotheses: int) -> State:
        """Return the state before the first token: zero sums, no blocks."""
        p, like = self.projection, upcast(self.q_proj.weight)
        leading = batch_size, hypotheses
        sums = like.new_zeros(*leading, *((self.site.d_model,) if self.learned else (p.heads, p.key_width)))
        state = {"sums": sums, "columns": like.new_zeros(*leading, p.heads, self.iterations, 0), "count": 0}
        return state if self.learned else {**state, "means": like.new_zeros(*leading, p.key_heads, 0, p.key_width)}

    def next_token(self, state: State, token: Tensor, q: Tensor) -> State:
        """Add the newest token (B, N, D), or its queries (B, N, H, K), to the sums.

        Raises: MtkitError if an mlp was built for fewer positions.
        """
        count = state["count"] + 1
        self._check_length(count)
        return {**state, "sums": state["sums"] + upcast(token if self.learned else q), "count": count}

    def next_block(self, state: State, keys: Tensor) -> tuple[Tensor, State]:
        """Return the weights (B*N, H, 1, N) of the block that the newest token begins, after keys (B*N, G, t, K)."""
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
        """Return all sorted blocks: keys and values (B, H, N b, K), and which slots are filled (B, H, N b).

        It uses matrices over all tokens, real (B, T): means of blocks, exponentials divided by their sums, and
        mixtures.
        """
        at, heads, causal = torch.arange(tokens.shape[1], device=tokens.device), self.site.heads, self.site.causal
        places = torch.arange(-(-len(at) // self.block), device=at.device).unsqueeze(-1)
        of_block = (at // self.block == places) & real.unsqueeze(1)  # (B, N, T)
        reading = ((at <= places * self.block) if causal else of_block).expand_as(of_block).type_as(q)
        if self.learned:
            scores = F.relu(self.place_proj(F.relu(self.block_proj(reading @ tokens))))
            scores = scores.unflatten(-1, (heads, -1))[..., : len(places)].transpose(1, 2)
        else:
            mean_q, mean_k = (x / x.sum(-1, keepdim=True).clamp(min=1) for x in (reading, of_block.type_as(q)))
            mean_q, mean_k = mean_q.unsqueeze(1) @ expand_heads(q, heads), mean_k.unsqueeze(1) @ expand_heads(k, heads)
            scores = mean_q @ mean_k.transpose(-1, -2) * self.scale
        filled = of_block.any(-1).unsqueeze(1)  # (B, 1, N)
        seen = (places > places.T) if causal else filled.unsqueeze(-1) & filled.unsqueeze(-2)
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
        super().after_update(update, total_updates)
        self.updates.fill_(update)

    def _check_length(self, length: int) -> None:
        if self.longest is not None and length > self.longest:
            raise MtkitError(
                f"sinkhorn_sortnet=mlp was built for {self.longest} positions, not {length}: raise model.max_length"
            )

    def _gumbel(self, number: Tensor) -> Tensor:
        """Return Gumbel noise (H, N, N), a function of seed, role, layer, update, head and both blocks."""
        head = torch.arange(self.site.heads, device=number.device).view(-1, 1, 1)
        bits = hashed(hashed(hashed(hashed(self.updates + self.key) + head) + number.unsqueeze(-1)) + number)
        uniform = ((bits >> 9) + 0.5) / 2**23  # exact in float32, and neither 0 nor 1
        return -(-uniform.log()).log()
