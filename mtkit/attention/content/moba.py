"""MoBA: each query attends to its own block of keys and to the blocks whose mean key matches it best.

Paper: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025, arXiv 2502.13189, equations 4 to 6 and
algorithm 1. The score of a block is the product of the query and the mean of the block's keys. A query takes its own
block, in the decoder role up to its own position, and the `selected` - 1 earlier blocks with the largest scores; one
softmax runs over all their tokens. The choice has no gradient and no parameters.
Departures: the default block is shorter than the paper's (512 to 4,096 tokens). Of blocks with equal scores the earlier
one is taken; the authors' code (`>=`) then takes more. With `selected` = 1 a query sees its own block only; there it
sees all tokens. The encoder role (all blocks but the own one compete) and the cross role (all compete) are extensions.
Means are over real tokens.
Cost: O(T (T/b + k b)) time and O(T) memory. A step costs O(t/b + k b) and keeps all keys and values.

Queries and means are in float32 at least: rounding to bfloat16 would change choices.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, picked, places_in_blocks, start_cache, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.chosen_blocks import Near, attend_chosen, best_blocks
from mtkit.attention.kernels.dot_product import attend, attend_step, expand_heads, safe_softmax, scores_of, upcast
from mtkit.attention.kernels.reproducible import replay_choice
from mtkit.attention.options import Positive
from mtkit.attention.slots import combining

SCORES_AT_ONCE = 1 << 18
"""Scores of blocks that are held at a time."""


class MoBA(HeadAttention):
    """Softmax attention to the blocks of keys that match the query.

    block: tokens per block. selected: number of blocks that a query sees, its own included.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"decoder"})
    paper = "Lu et al. 2025, arXiv 2502.13189"
    complexity = "O(T (T / b + k b))"
    growth = 2
    sequential_operations = "O(1)"
    longest_path = "by content"
    unrounded = True
    slots = combining("projection", "merge", "nearby", positions={"rotary"}, regularizer={"disagreement"})
    small: ClassVar[Mapping[str, Any]] = {"block": 4, "selected": 2}
    variants = ({"selected": 1}, {"block": 1, "selected": 3})

    def __init__(self, site: Site, *, block: Positive = 64, selected: Positive = 3) -> None:
        super().__init__(site)
        self.block, self.selected = block, selected

    def attend(self, inputs: Inputs) -> Attended:
        """Softmax over the chosen blocks, or over all keys if there are at most as many blocks."""
        valid, self_role = inputs.context_valid, inputs.memory is None
        q, (k, v) = self.exact_queries(inputs.query), self.exact_keys_values(inputs.context)
        how: dict[str, Any] = {"scale": self.scale, "causal": self.site.causal, "valid": valid, "dropout": self.dropout}
        near_q, near_k = q.type_as(v), k.type_as(v)
        if k.shape[2] <= self.selected * self.block:
            heads, _ = attend(near_q, near_k, v, **how)
        else:
            chosen = self._chosen(q, k, valid, self_role)
            near = Near() if self_role else None
            heads = attend_chosen(near_q, near_k, v, chosen, self.block, near=near, **how)
        return self.result(inputs, heads, v)

    @torch.no_grad()
    def _chosen(self, q: Tensor, k: Tensor, valid: Tensor | None, self_role: bool) -> Tensor:
        """Return the blocks (B, H, T, k) of each query, its own first in the self roles; M means none.

        Scores are computed for some of the queries at a time.
        """
        means, there = block_means(k, valid, self.block)
        block = torch.arange(means.shape[2], device=q.device)
        hidden = torch.zeros_like(block).where(there, float("-inf"))[:, None, None]  # (B or 1, 1, 1, M)
        parts, count = [], max(SCORES_AT_ONCE // (q.shape[:2].numel() * len(block)), 1)
        for first in range(0, q.shape[2], count):
            scores = block_scores(q[:, :, first : first + count], means) + hidden
            if self_role:
                own_block = torch.arange(first, first + scores.shape[2], device=q.device).unsqueeze(-1) // self.block
                scores.masked_fill_(block == own_block, float("inf"))
                if self.site.causal:
                    scores.masked_fill_(block > own_block, float("-inf"))
            parts.append(best_blocks(scores, self.selected))
        return replay_choice(torch.cat(parts, dim=2), len(block) + 1)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return empty caches of keys, values and block means; in the cross role the source's blocks."""
        memory, valid = inputs.memory, inputs.memory_valid
        if memory is not None:
            k, v = self.exact_keys_values(memory)
            if k.shape[2] <= self.selected * self.block:
                return {"shared": {"keys": k.type_as(v), "values": v, "valid": valid}}, None
            means, there = block_means(k, valid, self.block)
            shared = {"keys": k.type_as(v), "values": v, "valid": valid, "means": means}
            return {"shared": {**shared, "there": there.expand(len(memory), -1)}}, None
        like, shapes = self.q_proj.weight, self.cache_shapes
        blocks = start_cache(inputs.batch_size, inputs.hypotheses, upcast(like), means=shapes["keys"])
        return {**start_cache(inputs.batch_size, inputs.hypotheses, like, **shapes), "blocks": blocks}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Score the blocks before the token's own, then attend to the chosen ones and to its own."""
        query = inputs.query
        if "shared" in state:
            return Attended(self._step_over_source(query, state["shared"])), state
        here: int = state["count"]
        q, k, v = self.newest_heads(query, torch.full((1,), here, device=query.device), exact=True)
        state = {**append(state, keys=k.type_as(v), values=v), "blocks": self._add_key(state["blocks"], k, here)}
        keys, values, visible = written(state, "keys"), written(state, "values"), None
        if here >= self.selected * self.block:
            own_block = here // self.block
            means = written(state["blocks"], "means")[:, :, :, :own_block]
            scores = block_scores(q.flatten(0, 1).unsqueeze(2), means.flatten(0, 1)).squeeze(2)
            others = best_blocks(scores, self.selected - 1).unflatten(0, query.shape[:2])  # (B, N, H, k - 1)
            place, visible = places_in_blocks(F.pad(others, (0, 1), value=own_block), self.block, here + 1)
            keys, values = (picked(x, place) for x in (keys, values))
        heads, _ = attend_step(q.type_as(v), keys, values, scale=self.scale, visible=visible)
        return Attended(self.merge_heads(heads.transpose(1, 2), query)), state

    def _add_key(self, state: State, k: Tensor, here: int) -> State:
        """Return the block means with a key (B, N, G, K) at position `here` added to the sum of the open block."""
        total = k if here % self.block == 0 else state["sum"] + k
        if (here + 1) % self.block == 0:
            state = append(state, means=total / self.block)
        return {**state, "sum": total}

    def _step_over_source(self, query: Tensor, shared: State) -> Tensor:
        """Attend to the blocks of the source that each query chooses; (B, N, D)."""
        q, keys, values, valid = self.exact_queries(query), shared["keys"], shared["values"], shared["valid"]
        visible = None if valid is None else valid[:, None, None]
        if "means" in shared:
            hidden = torch.zeros_like(q[:, :1, :1, :1]).where(shared["there"][:, None, None], float("-inf"))
            chosen = best_blocks(block_scores(q, shared["means"]) + hidden, self.selected)  # (B, H, N, k)
            place, visible = places_in_blocks(chosen.transpose(1, 2), self.block, keys.shape[2], valid)
            keys, values = (picked(x.unsqueeze(1), place) for x in (keys, values))
        heads, _ = attend_step(q.transpose(1, 2).type_as(values), keys, values, scale=self.scale, visible=visible)
        return self.merge_heads(heads.transpose(1, 2), query)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """List the blocks of each query, and mask a dense softmax."""
        source, valid, size = inputs.context, inputs.context_valid, self.block
        q, (k, v) = self.exact_queries(inputs.query), self.exact_keys_values(source)
        q, k, v = (expand_heads(x, self.projection.heads) for x in (q, k, v))
        lengths = [source.shape[1]] * len(q) if valid is None else valid.sum(1).tolist()
        visible = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
        for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
            blocks = [range(start, min(start + size, lengths[b])) for start in range(0, lengths[b], size)]
            own_block = i // size if inputs.memory is None else -1
            others = [m for m in range(len(blocks)) if m != own_block and (m < own_block or not self.site.causal)]
            score = {m: sum((q[b, h, i] @ k[b, h, j]).item() for j in blocks[m]) / len(blocks[m]) for m in others}
            best = sorted(others, key=lambda m: (-score[m], m))[: self.selected - (own_block >= 0)]
            for m in [*best, *([own_block] if 0 <= own_block < len(blocks) else [])]:
                visible[b, h, i, [j for j in blocks[m] if j <= i or not self.site.causal]] = True
        heads = safe_softmax(q @ k.mT * self.scale, visible) @ v
        return Attended(self.merge_heads(heads, inputs.query))


def block_means(k: Tensor, valid: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """Return the means (B, G, M, K) of the real keys of each block, and which blocks have any, (B or 1, M)."""
    rest = -k.shape[2] % size
    real = k.new_ones(1, k.shape[2]) if valid is None else valid.type_as(k)
    real = F.pad(real, (0, rest)).unflatten(1, (-1, size))  # (B or 1, M, size)
    rows = F.pad(k, (0, 0, 0, rest)).unflatten(2, (-1, size))
    count = real.sum(-1)
    if valid is not None:
        rows = rows.masked_fill(real[:, None, :, :, None] == 0, 0.0)
    return rows.sum(-2) / count.clamp(min=1)[:, None, :, None], count > 0


def block_scores(q: Tensor, means: Tensor) -> Tensor:
    """Return the products (B, H, T, M) of queries (B, H, T, K) and block means (B, G, M, K), in float32 at least."""
    with torch.autocast(q.device.type, enabled=False):
        return scores_of(upcast(q), upcast(means), 1.0)
