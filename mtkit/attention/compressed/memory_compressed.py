"""Memory-compressed attention: a strided convolution makes one key and value from every few neighbouring tokens.

Paper: Liu, Saleh, Pot, Goodrich, Sepassi, Kaiser and Shazeer, "Generating Wikipedia by Summarizing Long Sequences",
ICLR 2018, arXiv 1801.10198, section 4.2.3.
In the decoder a query sees the blocks that have ended at or before its own position. Because the first queries would
then see nothing, every query also sees the first token, uncompressed, or a learned pair. Factor 1 needs neither.
Departures: padded rows are zeroed before the convolution, and a block counts if it holds a real token, so that the
result of a segment is independent of its batch. The authors' code hides a block from its last token; here it sees the
block. The kernels start as the average of a block, so that attention starts near attention to uncompressed keys. The
convolution of the keys has no bias: it would be the same in every full block, so it would change the weights only
relative to a first key, which is not convolved. The paper alternates these layers with block-local ones.
Cost: O(T S / f) time; the keys and values of S / f blocks. A step costs O(t / f), and O(S / f) over a source.
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.compressed._spans import (
    Pool,
    Spans,
    append_row,
    convolution,
    pooled,
    spans_seen,
    spans_valid,
    start_spans,
)
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, for_heads, packing
from mtkit.attention.kernels.dot_product import attend, attend_step, expand_heads, safe_softmax
from mtkit.attention.kernels.fused import fused_attention
from mtkit.attention.options import OneOf, Positive
from mtkit.attention.slots import combining

FIRST = ("token", "null")
GROUPS = ("heads", "full")


class MemoryCompressed(HeadAttention):
    """Softmax attention to blocks of tokens, each compressed to one key and value by a learned convolution.

    factor: tokens per block, the convolution's kernel and stride. first: what every query of the decoder role sees
    in addition to blocks, the first token ("token") or a learned pair ("null"). groups: whether the convolution mixes
    the channels of each head ("heads") or of all heads ("full").
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Liu et al. 2018, arXiv 1801.10198"
    complexity = "O(T² / f)"
    growth = 2
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    slots = combining("projection", "merge", "nearby", regularizer={"disagreement"})
    undecayed = ("value_bias",)
    small: ClassVar[dict[str, Any]] = {"factor": 2}
    variants = ({"factor": 1}, {"factor": 5}, {"first": "null"}, {"groups": "full"})

    def __init__(
        self,
        site: Site,
        *,
        factor: Positive = 3,
        first: Annotated[str, OneOf(FIRST)] | None = "token",  # YAML reads the word null as None
        groups: Annotated[str, OneOf(GROUPS)] = "heads",
    ) -> None:
        super().__init__(site)
        self.spans = Spans(factor, factor)
        self.full = groups == "full"
        self.first = (first or "null") if site.causal and factor > 1 else None
        p = self.projection
        self.key_kernel = self._average(p.key_heads, p.key_width)
        self.value_kernel = self._average(p.value_heads, p.value_width)
        self.value_bias = nn.Parameter(torch.zeros(self.value_kernel.shape[0], self.value_kernel.shape[-1]))
        if self.first == "null":
            self.null_key = nn.Parameter(torch.zeros(p.key_heads, p.key_width))
            self.null_value = nn.Parameter(torch.zeros(p.value_heads, p.value_width))

    def attend(self, inputs: Inputs) -> Attended:
        """Compute softmax(Q conv(K)^T / sqrt(K)) conv(V)."""
        valid = inputs.context_valid
        q, (k, v) = self.queries(inputs.query), self.keys_values(inputs.context)
        keys, values = (pooled(x, self.spans, self.pools[name], valid) for name, x in (("keys", k), ("values", v)))
        if self.site.causal:
            heads = self._causal(q, *self._with_first(k, v, keys, values))
        else:
            mask = None if valid is None else spans_valid(valid, self.spans)
            heads, _ = attend(q, keys, values, scale=self.scale, valid=mask, dropout=self.dropout)
        return self.result(inputs, heads, v)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        memory_valid = inputs.memory_valid
        if inputs.memory is not None:
            rows = zip(("keys", "values"), self.keys_values(inputs.memory), strict=True)
            shared = {name: pooled(x, self.spans, self.pools[name], memory_valid) for name, x in rows}
            mask = None if memory_valid is None else spans_valid(memory_valid, self.spans)
            return {"shared": {**shared, "valid": mask}}, None
        state = start_spans(inputs.batch_size, inputs.hypotheses, self.q_proj.weight, **self.cache_shapes)
        if self.first == "null":
            k, v = (x.expand(inputs.batch_size, inputs.hypotheses, -1, -1) for x in (self.null_key, self.null_value))
            state["spans"] = append(state["spans"], keys=k, values=v)
        return {**state, "count": 0}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        query = inputs.query
        visible = None
        if self.site.role == "cross":
            q, blocks = self.queries(query).transpose(1, 2), state["shared"]
            keys, values = blocks["keys"], blocks["values"]
            visible = None if blocks["valid"] is None else blocks["valid"][:, None, None]
        else:
            q, k, v = self.newest_heads(query)
            first = state["count"] == 0
            state = append_row({**state, "count": state["count"] + 1}, self.spans, self.pools, keys=k, values=v)
            if first and self.first == "token":  # written before the first block ends, so its place is the first
                state["spans"] = append(state["spans"], keys=k, values=v)
            keys, values = (written(state["spans"], name) for name in ("keys", "values"))
        heads, _ = attend_step(q, keys, values, scale=self.scale, visible=visible)
        return Attended(self.merge_heads(heads.transpose(1, 2), query)), state

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        memory, valid = inputs.context, inputs.context_valid
        k, v = self.keys_values(memory)
        real = memory.new_ones(memory.shape[:2]) if valid is None else valid.type_as(memory)
        compressed = []
        for x, kernel, bias in ((k, self.key_kernel, None), (v, self.value_kernel, self.value_bias)):
            tokens, blocks = x.transpose(1, 2).flatten(2), []
            for start in range(0, x.shape[2], self.spans.size):
                block = torch.zeros_like(tokens[:, 0]) if bias is None else bias.flatten().expand(len(x), -1)
                for place, token in enumerate(range(start, min(start + self.spans.size, x.shape[2]))):
                    matrix = torch.block_diag(*kernel[:, place])
                    block = block + (tokens[:, token] * real[:, token, None]) @ matrix
                blocks.append(block)
            compressed.append(torch.stack(blocks, 1).unflatten(-1, (x.shape[1], -1)).transpose(1, 2))
        keys, values = self._with_first(k, v, *compressed)
        i, s = torch.arange(inputs.query.shape[1]).unsqueeze(-1), torch.arange(compressed[0].shape[2])
        if self.site.causal:
            seen = F.pad((s + 1) * self.spans.size - 1 <= i, (int(self.first is not None), 0), value=True)
        else:
            seen = real[:, None, :: self.spans.size] > 0
        heads = [
            safe_softmax(q @ key.transpose(-1, -2) * self.scale, seen) @ value
            for q, key, value in zip(
                *(expand_heads(x, self.site.heads).unbind(1) for x in (self.queries(inputs.query), keys, values)),
                strict=True,
            )
        ]
        return Attended(self.merge_heads(torch.stack(heads, dim=1), inputs.query))

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the norms of the kernels at each place of a block."""
        kernels = {"key kernel norm": self.key_kernel, "value kernel norm": self.value_kernel}
        norms = {name: kernel.flatten(2).norm(dim=-1) for name, kernel in kernels.items()}
        rows = {name: norm if self.full else for_heads(norm, self.site.heads) for name, norm in norms.items()}
        return super().learned_numbers(inputs) | rows

    @property
    def pools(self) -> dict[str, Pool]:
        """Pools that make the keys and values of blocks."""
        pools = {"keys": convolution(self.key_kernel), "values": convolution(self.value_kernel, self.value_bias)}
        return {name: _across_heads(pool) for name, pool in pools.items()} if self.full else pools

    def _average(self, heads: int, width: int) -> nn.Parameter:
        """Return the kernel (G, f, K, K), or (1, f, G*K, G*K) over all channels, that averages a block."""
        groups, width = (1, heads * width) if self.full else (heads, width)
        kernel = torch.zeros(groups, self.spans.size, width, width)
        kernel.diagonal(dim1=-2, dim2=-1).fill_(1 / self.spans.size)
        return nn.Parameter(kernel)

    def _with_first(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the key and value that every causal query sees before the blocks' keys and values (B, G, P, K)."""
        if self.first is None:
            return keys, values
        first = (k[:, :, :1], v[:, :, :1])
        if self.first == "null":
            first = self.null_key.unsqueeze(1).expand_as(first[0]), self.null_value.unsqueeze(1).expand_as(first[1])
        return torch.cat([first[0].type_as(keys), keys], 2), torch.cat([first[1].type_as(values), values], 2)

    def _causal(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the heads' outputs (B, H, T, V) over the ended blocks and the key before them."""
        extra = int(self.first is not None)
        position, number = (torch.arange(n, device=q.device) for n in (q.shape[2], keys.shape[2] - extra))
        seen = F.pad(spans_seen(self.spans, position, number, causal=True), (extra, 0), value=True)
        keys, values = (expand_heads(x, q.shape[1]) for x in (keys, values))
        return fused_attention(q, keys, values, scale=self.scale, mask=seen, dropout=self.dropout)


def _across_heads(pool: Pool) -> Pool:
    """Wrap a pool of concatenated heads, so that it takes and returns separate heads."""

    def concatenated(rows: Tensor, mask: Tensor | None) -> Tensor:
        heads = rows.shape[1]
        summaries = pool(rows.movedim(1, -2).flatten(-2).unsqueeze(1), mask)  # (B, 1, P, G*V)
        return summaries.squeeze(1).unflatten(-1, (heads, -1)).movedim(-2, 1)

    return concatenated
