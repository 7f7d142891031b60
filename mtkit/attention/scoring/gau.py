"""Gated attention unit: one head with relu² weights, inside an output gate; over chunks, joined by linear attention.

Paper: Hua, Dai, Liu and Le, "Transformer Quality in Linear Time", ICML 2022, arXiv 2202.10447, sections 2 and 3:
u = silu(W_u x), v = silu(W_v x), z = silu(W_z x), q and k are z * kappa + mu, and the output is W_o(u * A v). In the
form "quadratic", A_ij = relu(q_i . k_j / n + b_(j-i))². In the form "mixed" (FLASH), A is computed within chunks of c
tokens, with n = c, and a second pair of q and k adds linear attention: over all tokens, divided by their number, or in
the decoder role over the finished chunks, divided by the number of their tokens.
The scale: the paper's text could not be read, and accounts of it differ. In the paper's listing, as it is known, and in
the version of Mega's authors, 1/n multiplies the products only, as here; others divide the sum with b, or by sqrt(s)
too. n is the number of real tokens, in the decoder role of the prefix; Mega's authors divide by the full length,
with which steps give other results.
Departures: the paper's unit takes the place of attention and feed-forward sub-layer; here it is the attention, so that
a fair comparison has a feed-forward sub-layer of half the width. b is a learned number for each distance; the paper
factors it for long sequences. Maps have biases. Dropout acts on the relu² weights. The number of heads is not used.
Cost: mixed O(T (c (s + e) + s e)) time for width s of queries and e of values, O(T) memory; a step takes O(c (s + e) +
s e). Quadratic: O(T² (s + e)) time and O(T) memory, a step O(t (s + e)).
"""

from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import written
from mtkit.attention.bases.score_attention import Pairs
from mtkit.attention.bases.single_head import ScaleAndShift, SingleHead, in_chunks
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import by_hypotheses, upcast
from mtkit.attention.options import Null, OneOf, Positive, Within
from mtkit.attention.positions import Rotary

FORMS = ("mixed", "quadratic")
QUERY, KEY, LINEAR_QUERY, LINEAR_KEY = range(4)


class GAU(SingleHead):
    """One head with relu² weights inside of chunks, linear attention across them, and an output gate.

    form: relu² weights inside of chunks plus linear attention ("mixed"), or over all tokens ("quadratic"). chunk:
    number of tokens in a chunk; it has no effect in the form "quadratic". s_width: width of queries and keys. expand:
    width of the values, in shares of the model's width. rotary: whether queries and keys are rotated by their position.
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Hua et al. 2022, arXiv 2202.10447"
    complexity = "O(T)"
    growth = 1
    longest_path = "by content"  # a relu² weight can be 0
    weights = False
    variants = ({"s_width": 5, "expand": 0.5},)

    def __init__(
        self,
        site: Site,
        *,
        form: Annotated[str, OneOf(FORMS)] = "mixed",
        chunk: Positive = 256,
        s_width: Annotated[Positive | None, Null("a quarter of the model's width")] = None,
        expand: Annotated[float, Within(0.125, 8.0)] = 2.0,
        rotary: bool = True,
    ) -> None:
        width, values = s_width or max(1, site.d_model // 4), max(1, round(site.d_model * expand))
        mixed = form == "mixed"
        super().__init__(site, key_width=width, value_width=values, chunk=chunk if mixed else None, activation="relu2")
        del self.q_proj, self.k_proj
        self.z_proj, self.gate_proj = nn.Linear(site.d_model, width), nn.Linear(site.d_model, values)
        self.initialize(self.children())
        self.vectors = ScaleAndShift(4 if mixed else 2, width)
        self.rotary = Rotary(site, width) if rotary else None

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """Return q (B, 1, T, s) of rows (B, T, D + s) at position (T,)."""
        return self._vectors(query, QUERY, position)

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        """Return keys (B, 1, T, s) and values (B, 1, T, e) of rows (B, T, D + s).

        The mixed form also has keys of linear attention (B, 1, T, s).
        """
        names = {"keys": KEY} | ({} if self.chunk is None else {"linear_keys": LINEAR_KEY})
        columns = {name: self._vectors(memory, which, position) for name, which in names.items()}
        values = F.silu(self.v_proj(memory[..., : self.site.d_model]))
        return columns | {"values": values.unsqueeze(1)}

    def counts(self, pairs: Pairs) -> Tensor | float:
        """Return n: the size of a chunk, or the number of keys that a query may see."""
        return super().counts(pairs) if self.chunk is None else float(self.chunk)

    def merge_heads(self, heads: Tensor, query: Tensor) -> Tensor:
        """Return W_o(u * o) of heads (B, 1, T, e) and rows (B, T, D + s)."""
        gate = F.silu(self.gate_proj(query[..., : self.site.d_model]))
        output: Tensor = self.out_proj(gate * heads.squeeze(1).type_as(gate))
        return output

    def attend(self, inputs: Inputs) -> Attended:
        """The equations of the module, in O(T) memory."""
        valid = inputs.query_valid
        # zeros at padding: the fourth power of its vectors, which no real token reads, might be infinite
        rows = self._rows(inputs.query if valid is None else inputs.query.masked_fill(~valid.unsqueeze(-1), 0.0))
        if self.chunk is None:
            return super().attend(replace(inputs, query=rows, need_weights=False))
        pairs = self.pairs(rows, valid=valid)
        heads, q = self.chunk_heads(pairs), self._vectors(rows, LINEAR_QUERY, None)
        linear = self._across(q, pairs.columns["linear_keys"], pairs.values, valid)
        return Attended(self.merge_heads(heads + linear.type_as(heads), rows))

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        state, carry = super().begin(inputs)
        if self.chunk is not None:
            p, like = self.projection, upcast(self.table)
            state["sums"] = like.new_zeros(inputs.batch_size, inputs.hypotheses, p.key_width, p.value_width)
        return state, carry

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """The same for the newest token of each hypothesis, from the open chunk and the sums over finished ones."""
        rows = self._rows(inputs.query)
        if self.chunk is None:
            return super().advance(replace(inputs, query=rows, need_weights=False), state)
        pairs, after = self.newest(rows, state)
        heads = by_hypotheses(self.attended(pairs, None, False)[0], pairs.hypotheses)  # (B, 1, N, e)
        with torch.autocast(rows.device.type, enabled=False):
            if finished := state["count"] // self.chunk * self.chunk:
                here = torch.full((1,), state["count"], device=rows.device)
                q = self._vectors(rows.unsqueeze(2).flatten(0, 1), LINEAR_QUERY, here)  # (B * N, 1, 1, s)
                read = upcast(q).view(*rows.shape[:2], *q.shape[2:]) @ state["sums"] / finished
                heads = heads + read.squeeze(2).unsqueeze(1).type_as(heads)
            if not after["count"] % self.chunk:
                k, v = (
                    upcast(written(after, name, window=self.chunk).squeeze(2)) for name in ("linear_keys", "values")
                )
                after["sums"] = state["sums"] + k.mT @ v
        return Attended(self.merge_heads(heads, rows)), after

    def _rows(self, tokens: Tensor) -> Tensor:
        """Return tokens (B, T, D) and their z as one tensor (B, T, D + s)."""
        return torch.cat([tokens, F.silu(self.z_proj(tokens)).type_as(tokens)], -1)

    def _vectors(self, rows: Tensor, which: int, position: Tensor | None) -> Tensor:
        """Return z * kappa + mu, rotated, (B, 1, T, s)."""
        vectors: Tensor = self.vectors(rows[..., self.site.d_model :], which)
        if self.rotary is not None:
            here = torch.arange(rows.shape[1], device=rows.device) if position is None else position
            vectors = self.rotary.rotate(vectors, here)
        return vectors.unsqueeze(1)

    def _across(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        """Return linear attention (B, 1, T, e) of q and k (B, 1, T, s) and v (B, 1, T, e), in O(T) memory."""
        q, k, v = upcast(q), upcast(k), upcast(v)
        with torch.autocast(q.device.type, enabled=False):
            if self.site.causal:  # padding is on the right, in chunks that no real token reads
                return self._across_finished(q, k, v)
            count: Tensor | int = k.shape[2]
            if valid is not None:
                k = k.masked_fill(~valid[:, None, :, None], 0.0)
                count = valid.sum(1).clamp(min=1).view(-1, 1, 1, 1)
            return q @ (k.mT @ v / count)

    def _across_finished(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the same for each chunk over all chunks before it."""
        assert self.chunk is not None
        batch, length = len(q), q.shape[2]
        if length <= self.chunk:
            return torch.zeros_like(v)
        q, k, v = (in_chunks(x, self.chunk).unflatten(0, (batch, -1)) for x in (q, k, v))  # (B, chunks, 1, c, ...)
        counts = self.chunk * torch.arange(1, q.shape[1], device=q.device)
        sums = (k[:, :-1].mT @ v[:, :-1]).cumsum(1) / counts.view(-1, 1, 1, 1)
        read = F.pad(q[:, 1:] @ sums, (0, 0, 0, 0, 0, 0, 1, 0))
        return read.transpose(1, 2).flatten(2, 3)[:, :, :length]

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute the equations token by token."""
        x, valid = inputs.query, inputs.query_valid
        z = F.silu(self.z_proj(x))
        u, v = F.silu(self.gate_proj(x)), F.silu(self.v_proj(x))
        vectors = [z * kappa + mu for kappa, mu in zip(self.vectors.kappa, self.vectors.mu, strict=True)]
        if self.rotary is not None:
            vectors = [self.rotary.rotate(x_of, torch.arange(x.shape[1])) for x_of in vectors]
        outputs = []
        for b in range(len(x)):
            real = x.shape[1] if valid is None else int(valid[b].sum())
            of_segment = [vector[b] for vector in vectors]
            outputs.append(torch.stack([self._literal(i, real, of_segment, v[b]) for i in range(x.shape[1])]))
        return Attended(self.out_proj(u * torch.stack(outputs)))

    def _literal(self, i: int, real: int, vectors: list[Tensor], v: Tensor) -> Tensor:
        """Return what token i reads in a segment with so many real tokens, (e,)."""
        causal, chunk = self.site.causal, self.chunk
        first, end = (0, real) if chunk is None else (i // chunk * chunk, min(real, (i // chunk + 1) * chunk))
        near = slice(first, max(first, min(end, i + 1) if causal else end))
        b = self.table[torch.arange(near.start, near.stop) - i + self.reach - 1]
        n = chunk or (i + 1 if causal else real)
        total = (vectors[KEY][near] @ vectors[QUERY][i] / n + b).clamp(min=0) ** 2 @ v[near]
        seen = 0 if chunk is None else first if causal else real
        return total + vectors[LINEAR_KEY][:seen] @ vectors[LINEAR_QUERY][i] / seen @ v[:seen] if seen else total
