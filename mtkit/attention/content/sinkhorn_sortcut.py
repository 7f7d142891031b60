"""SortCut: learned soft weights sort blocks of keys, and all queries read the first few sorted blocks.

Paper: Tay, Bahri, Yang, Metzler and Juan, "Sparse Sinkhorn Attention", ICML 2020, arXiv 2002.11296, section 3.4.
Blocks are sorted as by `sinkhorn` in the encoder, with the same departures.
In the cross role (an extension) only the source is sorted, so that target positions are independent of each other. With
sinkhorn_sortnet=attn, products of mean keys with mean keys score its blocks, because it has no queries.
Training adds Gumbel noise to the scores; it is drawn for each update and the same for all segments. Evaluation has
none.
Cost: O(T c b) for c blocks of b, and O(T² / b²) to sort them: O(T c sqrt T) for the default, which is close to the
square root of the longest length (32 of 1,024). No T x T tensor. A step over the source costs O(c b).
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.content._block_sorting import SORTNET, BlockSorting, sorted_rows
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.chunks import attend_beside
from mtkit.attention.kernels.dot_product import attend_step
from mtkit.attention.kernels.sparse import dense_attend
from mtkit.attention.options import Null, OneOf, Positive, Within
from mtkit.attention.slots import WITHOUT_SCORES


class SinkhornSortcut(BlockSorting):
    """Softmax attention over the first blocks of a sorted sequence.

    sinkhorn_block: tokens per block of the source. sortcut_blocks: number of blocks that are read. sinkhorn_iters: how
    often rows and columns are divided by their sums. sinkhorn_temperature: divisor of the scores. sinkhorn_sortnet:
    what scores blocks, "attn" (mean queries and keys) or "mlp" (two layers on the sum of the tokens, which limit the
    length).
    """

    roles = frozenset({"encoder", "cross"})
    published = frozenset({"encoder"})
    paper = "Tay et al. 2020, arXiv 2002.11296"
    complexity = "O(T c √T)"
    growth = 1.5
    slots = WITHOUT_SCORES
    small: ClassVar[dict[str, Any]] = {"sinkhorn_block": 4, "sortcut_blocks": 2}
    variants = ({"sinkhorn_sortnet": "mlp"}, {"sinkhorn_iters": 0}, {"sortcut_blocks": 1})

    def __init__(
        self,
        site: Site,
        *,
        sinkhorn_block: Annotated[Positive | None, Null("the square root of the longest length, rounded")] = None,
        sortcut_blocks: Positive = 2,
        sinkhorn_iters: Annotated[int, Within(0, 100)] = 8,
        sinkhorn_temperature: Annotated[float, Within(0.01, 100.0)] = 0.75,
        sinkhorn_sortnet: Annotated[str, OneOf(SORTNET)] = "attn",
    ) -> None:
        super().__init__(site, sinkhorn_block, sinkhorn_iters, sinkhorn_temperature, sinkhorn_sortnet)
        self.sorted_blocks = sortcut_blocks

    def attend(self, inputs: Inputs) -> Attended:
        """One softmax over the slots of the first sorted blocks, the same for all queries."""
        q = self.queries(inputs.query)
        source, valid = inputs.context, inputs.context_valid
        k, v = self.keys_values(source)
        keys, values, filled = self._sorted(source, q if inputs.memory is None else k, k, v, valid)
        visible = None if filled is None else filled[:, :, None, None]
        q, keys, values = (x.unsqueeze(2) for x in (q, keys, values))  # one block of queries
        heads = attend_beside(q, keys, values, visible, scale=self.scale, dropout=self.dropout).squeeze(2)
        return self.result(inputs, heads, v)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same result from a masked softmax over all sorted slots."""
        q = self.queries(inputs.query)
        source, valid = inputs.context, inputs.context_valid
        real = torch.ones_like(source[..., 0], dtype=torch.bool) if valid is None else valid
        k, v = self.keys_values(source)
        keys, values, filled = self.naive_sorted(source, q if inputs.memory is None else k, k, v, real)
        first = torch.arange(keys.shape[2], device=q.device) < self.sorted_blocks * self.block
        return Attended(
            self.merge_heads(dense_attend(q, keys, values, (filled & first).unsqueeze(-2), self.scale)[0], inputs.query)
        )

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        memory = inputs.memory
        assert memory is not None  # the cross role is the only one that steps
        k, v = self.keys_values(memory)
        keys, values, filled = self._sorted(memory, k, k, v, inputs.memory_valid)
        return {"shared": {"keys": keys, "values": values, "filled": filled}}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        shared = state["shared"]
        visible = None if shared["filled"] is None else shared["filled"].unsqueeze(1)
        rows = self.queries(inputs.query).transpose(1, 2)
        heads, _ = attend_step(rows, shared["keys"], shared["values"], scale=self.scale, visible=visible)
        return Attended(self.merge_heads(heads.transpose(1, 2), inputs.query)), state

    def _sorted(
        self, source: Tensor, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the first sorted blocks: keys (B, H, c b, K), values (B, H, c b, V), and the mask of filled slots."""
        size = max(min(self.block, source.shape[1]), 1)
        weights = self.order(source, q, k, valid, size)[:, :, : self.sorted_blocks]
        (keys, filled), (values, _) = (sorted_rows(weights, x, size, valid) for x in (k, v))
        return keys.flatten(2, 3), values.flatten(2, 3), None if filled is None else filled.flatten(2)
