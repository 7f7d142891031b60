"""Sinkhorn attention: learned soft weights sort blocks of keys; a query reads its own block and the sorted block.

Paper: Tay, Bahri, Yang, Metzler and Juan, "Sparse Sinkhorn Attention", ICML 2020, arXiv 2002.11296.
Scores of all block pairs become nearly a permutation: their exponentials are divided by the sums of rows and of
columns in turn. Row n then mixes the blocks of keys and values, slot by slot, into the block that block n reads.
Departures: the sorted and the own block share one softmax, so that a single block is full attention; the paper adds two
terms. By default, products of mean queries and keys score blocks (sinkhorn_sortnet=attn), which has no limit of length;
sinkhorn_sortnet=mlp is the paper's. Rows are finally divided by their sum over the blocks that have the slot. The
paper's blocks have 8 to 64 tokens; here their size follows the longest length, which bounds the cost.
In the decoder, block n mixes only earlier blocks, its scores depend on the tokens up to its first one, and sums of
columns run over rows up to n. Such sums lead to "the block before", whatever the scores, so that sinkhorn_iters is 0 by
default: each row is a softmax over the earlier blocks.
Training adds Gumbel noise to the scores; it is drawn for each update and the same for all segments. Evaluation has
none.
Cost: O(T b) for blocks of b, and O(T² / b) to mix them: O(T sqrt T) for the default, which is close to the square root
of the longest length (32 of 1,024). No T x T tensor. A step reads 2 b keys, and at the start of a block all t keys.
"""

from typing import Annotated, Any, ClassVar

import torch

from mtkit.attention.bases.caches import append, start_cache, written
from mtkit.attention.content._block_sorting import SORTNET, BlockSorting, block_rows, sorted_rows
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.chunks import attend_beside
from mtkit.attention.kernels.dot_product import attend_step, expand_heads
from mtkit.attention.kernels.sparse import dense_attend, visible_pairs
from mtkit.attention.options import NearRoot, Null, OneOf, Within
from mtkit.attention.slots import WITHOUT_SCORES


class Sinkhorn(BlockSorting):
    """Softmax attention over the own block and a mixture of others.

    sinkhorn_block: tokens per block. sinkhorn_iters: how often rows and columns are divided by their sums.
    sinkhorn_temperature: divisor of the scores. sinkhorn_sortnet: what scores blocks, "attn" (mean queries and keys) or
    "mlp" (two layers on the sum of the tokens, which limit the length).
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Tay et al. 2020, arXiv 2002.11296"
    complexity = "O(T √T)"
    growth = 1.5
    slots = WITHOUT_SCORES
    small: ClassVar[dict[str, Any]] = {"sinkhorn_block": 4}
    variants = ({"sinkhorn_sortnet": "mlp"}, {"sinkhorn_iters": 2}, {"sinkhorn_sortnet": "mlp", "sinkhorn_iters": 1})

    def __init__(
        self,
        site: Site,
        *,
        sinkhorn_block: NearRoot = None,
        sinkhorn_iters: Annotated[
            Annotated[int, Within(0, 100)] | None, Null("8 in the encoder, 0 in the decoder")
        ] = None,
        sinkhorn_temperature: Annotated[float, Within(0.01, 100.0)] = 0.75,
        sinkhorn_sortnet: Annotated[str, OneOf(SORTNET)] = "attn",
    ) -> None:
        super().__init__(site, sinkhorn_block, sinkhorn_iters, sinkhorn_temperature, sinkhorn_sortnet)

    def attend(self, inputs: Inputs) -> Attended:
        """One softmax over the sorted and the own block, block by block."""
        query = inputs.query
        causal, heads = self.site.causal, self.site.heads
        length, size = query.shape[1], max(min(self.block, query.shape[1]), 1)
        valid = None if causal else inputs.query_valid  # padding follows all real tokens
        q, k, v = self.queries_keys_values(query)
        order = self.order(query, q, k, valid, size)
        (keys, filled), (values, _) = (sorted_rows(order, x, size, valid) for x in (k, v))
        blocks = (block_rows(expand_heads(x, heads), size) for x in (k, v))
        keys, values = (torch.cat(pair, dim=3) for pair in zip((keys, values), blocks, strict=True))
        visible = None
        if causal:
            past = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
            others = (torch.arange(order.shape[2], device=q.device) > 0).view(-1, 1, 1).expand(-1, size, size)
            visible = torch.cat([others, past.expand_as(others)], dim=-1)[None, None]
        elif filled is not None:
            real = q.new_ones(1, length, dtype=torch.bool) if valid is None else valid
            real = block_rows(real[:, None, :, None], size).squeeze(-1)
            visible = torch.cat([filled, real.expand_as(filled)], dim=-1).unsqueeze(3)
        output = attend_beside(block_rows(q, size), keys, values, visible, scale=self.scale, dropout=self.dropout)
        output = output.flatten(2, 3)[:, :, :length]
        return self.result(inputs, output, v)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same result from a masked softmax over all sorted slots and all tokens."""
        query = inputs.query
        q, k, v = self.queries_keys_values(query)
        real = torch.ones_like(query[..., 0], dtype=torch.bool) if inputs.query_valid is None else inputs.query_valid
        keys, values, filled = self.naive_sorted(query, q, k, v, real)
        block, place = (torch.arange(n, device=q.device) // self.block for n in (query.shape[1], keys.shape[2]))
        others = (place == block.unsqueeze(-1)) & filled.unsqueeze(-2)
        near = visible_pairs(block == block.unsqueeze(-1), self.site.causal, real).expand(*others.shape[:3], -1)
        k, v = (torch.cat([x, expand_heads(local, self.site.heads)], 2) for x, local in ((keys, k), (values, v)))
        return Attended(self.merge_heads(dense_attend(q, k, v, torch.cat([others, near], -1), self.scale)[0], query))

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return an empty cache, and the sums for the scores of the next block."""
        return start_cache(inputs.batch_size, inputs.hypotheses, self.q_proj.weight, **self.cache_shapes) | {
            "order": self.start_order(inputs.batch_size, inputs.hypotheses)
        }, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Read the sorted block and the tokens of the own block; the first token of a block sorts."""
        query = inputs.query
        count, leading = state["count"], query.shape[:2]
        q, k, v = self.newest_heads(query)
        past = {name: written(state, name).flatten(0, 1) for name in ("keys", "values")}
        state = {**state, "order": self.next_token(state["order"], query, q)}
        if count and count % self.block == 0:
            weights, state["order"] = self.next_block(state["order"], past["keys"])
            mixed = {name: sorted_rows(weights, x, self.block)[0].squeeze(2) for name, x in past.items()}
            state["sorted"] = {name: x.unflatten(0, leading) for name, x in mixed.items()}
        state = append(state, keys=k, values=v)
        near = [written(state, name)[:, :, :, count - count % self.block :] for name in past]
        if "sorted" in state:
            spread = [expand_heads(x.flatten(0, 1), self.site.heads).unflatten(0, leading) for x in near]
            near = [torch.cat([state["sorted"][name], x], dim=3) for name, x in zip(past, spread, strict=True)]
        heads, _ = attend_step(q, *near, scale=self.scale)
        return Attended(self.merge_heads(heads.transpose(1, 2), query)), state
