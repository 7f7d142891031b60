"""Informer: only the queries whose attention differs most from uniform attend; the others get the mean of the values.

Paper: Zhou, Zhang, Peng, Zhang, Li, Xiong and Zhang, "Informer: Beyond Efficient Transformer for Long Sequence
Time-Series Forecasting", AAAI 2021, arXiv 2012.07436, section 3 (ProbSparse self-attention). The measure of a query,
over U keys sampled for it, is
    M_i = max_j q_i . k_j / sqrt(K) - mean_j q_i . k_j / sqrt(K).
Of T queries the u = c ceil(ln T) with the largest M are active, with y_i = softmax(q_i K^T / sqrt(K)) V; U is
c ceil(ln S); both are at least 1. For all other queries y_i is the mean of V.
Departures: keys are sampled without repeats: the keys are cut into U stretches of equal length, and one is drawn from
each. The draw is a hash of head, query and slot, the same in training, evaluation and decoding and in any batch; the
paper draws again in every pass. The mean in M is over the sample; the authors' code divides by S. Only real tokens are
ranked, sampled and averaged.
In the decoder the paper ranks over the whole sequence and samples later keys. Here (an extension) a query samples keys
up to its own position, is active if fewer than c ceil(ln(i + 1)) earlier queries have a larger M, and otherwise gets
the mean over its prefix. (The authors' code sums there.) Of equal measures, the encoder prefers the earlier token; in
the decoder they never make a query inactive. Queries and keys are projected in float32, under autocast too, and a
decoder's cache holds keys in float32, so that rounding changes no choice, except between repeated tokens without
positions.
Cost: O(T log T) time in the encoder. In the decoder about c ln² T / 2 queries are active if M has no trend, all if it
rises throughout, and each sees O(T) keys. Memory O(T). A step costs O(U K), t comparisons, and O(t K) for each active
head. An accelerator cannot branch without making the host wait: there all queries of the decoder attend, in the fused
kernel, and all heads in a step.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mtkit.attention.bases.caches import add_rows, append, picked, prefix_means, start_cache, start_sums, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import ROLES, Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.cached_rows import attend_cached, supports_cached
from mtkit.attention.kernels.chunks import rows_at
from mtkit.attention.kernels.dot_product import attend, attend_step, expand_heads, scores_of, upcast
from mtkit.attention.kernels.fused import fused_attention
from mtkit.attention.kernels.reproducible import hashed, random_key, replay_choice
from mtkit.attention.options import Positive
from mtkit.attention.slots import combining

AT_ONCE = 32
"""Active queries of a decoder whose masks are in memory at a time."""


class Informer(HeadAttention):
    """Softmax attention for the most selective queries; the mean of the values for the others.

    factor: c, the multiple of the logarithm of the length that gives the numbers of active queries and sampled keys.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"encoder"})
    paper = "Zhou et al. 2021, arXiv 2012.07436"
    complexity = "O(T log² T)"  # in the decoder; O(T log T) in the encoder
    growth = 1
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    unrounded = True
    # other positions add to scores, but each head has other active queries
    slots = combining("projection", "merge", "nearby", positions={"rotary"}, regularizer={"disagreement"})
    small: ClassVar[dict[str, Any]] = {"factor": 1}

    def __init__(self, site: Site, *, factor: Positive = 5) -> None:
        super().__init__(site)
        self.samples = Samples(site.heads, factor, random_key(site.seed, ROLES.index(site.role), site.layer))

    def attend(self, inputs: Inputs) -> Attended:
        query_valid = inputs.query_valid
        q, k, v = self.exact_queries_keys_values(inputs.query)
        active = replay_choice(self._active(q.detach(), k.detach(), query_valid), 2)
        if self.site.causal and not self._skips_others(active):
            keys, values = (expand_heads(x.type_as(v), self.site.heads) for x in (k, v))
            how: dict[str, Any] = {"scale": self.scale, "dropout": self.dropout}
            rows = fused_attention(q.type_as(v), keys, values, is_causal=True, **how)
            others = prefix_means(v)
        elif self.site.causal:
            rows = _spread_active(self._attend_past(q.type_as(v), k.type_as(v), v, active), active)
            others = prefix_means(v)
        else:
            place = _places(active, self.samples.most(inputs.query.shape[1]))
            how = {"scale": self.scale, "valid": query_valid, "dropout": self.dropout}
            heads, _ = attend(rows_at(q, place.unsqueeze(2)).squeeze(2).type_as(v), k.type_as(v), v, **how)
            rows, others = _spread_active(heads, active), _mean(v, query_valid)
        heads = torch.where(active.unsqueeze(-1), rows, expand_heads(others, self.site.heads).type_as(v))
        return self.result(inputs, heads, v)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        like = self.q_proj.weight
        state = start_cache(inputs.batch_size, inputs.hypotheses, like, **self.cache_shapes)
        past = start_cache(inputs.batch_size, inputs.hypotheses, like, measures=(self.site.heads, 1))
        return {**state, "past": past, "sums": start_sums("values")}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        query = inputs.query
        position = torch.full((1,), state["count"], device=query.device)
        q, k, v = self.newest_heads(query, position, exact=True)
        past, sums = state["past"], add_rows(state["sums"], values=v)
        state = {**append(state, keys=k, values=v), "sums": sums}
        number: int = state["count"]
        with torch.autocast(query.device.type, enabled=False):
            picks, sampled_mask = self.samples.picks(position, (position + 1).view(1, 1, 1), self.samples.most(number))
            if number <= MOST_KEYS:
                keys = written(state, "keys").flatten(0, 1)
                scores = scores_of(q.flatten(0, 1).unsqueeze(2), keys, 1.0).gather(
                    -1, picks.expand(len(keys), -1, -1, -1)
                )
                scores = scores.squeeze(2).unflatten(0, q.shape[:2])
            else:
                scores = (picked(state["keys"], picks.squeeze(2)) @ q.unsqueeze(-1)).squeeze(-1)  # (B, N, H, U)
            measure = spikiness(scores, sampled_mask.squeeze(2)).unsqueeze(-1)
            larger_before = (written(past, "measures").squeeze(-1) > measure).sum(-1)
            active = larger_before < self.samples.most(number)  # (B, N, H)
            others = (sums["values"] / number).type_as(v)
            heads = others.repeat_interleave(self.site.heads // others.shape[2], dim=2)
            heads = self._attend_active(q, state, active, heads)
        state["past"] = append(past, measures=measure)
        return Attended(self.merge_heads(heads.transpose(1, 2), query)), state

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        query = inputs.query
        q, k, v = self.exact_queries_keys_values(query)
        k, v = expand_heads(k, self.site.heads), expand_heads(v, self.site.heads)
        lengths = [query.shape[1]] * len(query) if inputs.query_valid is None else inputs.query_valid.sum(1).tolist()
        rows = []
        for b, length in enumerate(lengths):
            i = torch.arange(length, device=query.device)
            seen = i + 1 if self.site.causal else torch.full_like(i, length)
            picks, used = self.samples.picks(i, seen.view(1, 1, -1), self.samples.most(length or 1))
            for h in range(self.site.heads):
                scores = [q[b, h, j] @ k[b, h, picks[0, h, j][used[0, h, j]]].T for j in range(length)]
                measure = [(row_scores.max() - row_scores.mean()).item() for row_scores in scores]
                row = [v.new_zeros(v.shape[-1])] * query.shape[1]
                for j, keys in enumerate(seen.tolist()):
                    larger_before = sum(other > measure[j] for other in measure[:j])
                    if not self.site.causal:
                        larger_before += sum(other == measure[j] for other in measure[:j])
                        larger_before += sum(other > measure[j] for other in measure[j:])
                    weights = (k[b, h, :keys] @ q[b, h, j] * self.scale).softmax(-1)
                    uniform = torch.full_like(weights, 1 / keys)
                    row[j] = (weights if larger_before < self.samples.most(keys) else uniform) @ v[b, h, :keys]
                rows.append(torch.stack(row))
        return Attended(self.merge_heads(torch.stack(rows).unflatten(0, (len(query), -1)), query))

    def _active(self, q: Tensor, k: Tensor, valid: Tensor | None) -> Tensor:
        """Return whether each query attends, (B, H, T); False at padding."""
        i = torch.arange(q.shape[2], device=q.device)
        if self.site.causal:
            keys = (i + 1).view(1, 1, -1)
        else:
            keys = i.new_full((1, 1, 1), q.shape[2]) if valid is None else valid.sum(-1).view(-1, 1, 1)
        with torch.autocast(q.device.type, enabled=False):
            measures = self.samples.measures(q, k, keys)
        real = None if valid is None else valid.unsqueeze(1)
        if self.site.causal:
            rank = earlier_larger(measures)
        else:
            measures = measures if real is None else measures.masked_fill(~real, -torch.inf)
            rank = measures.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        active = rank < self.samples.size(keys)
        return active if real is None else active & real

    def _attend_past(self, q: Tensor, k: Tensor, v: Tensor, active: Tensor) -> Tensor:
        """Return the outputs (B, H, A, V) of a decoder's active queries, in order; A is the largest count of a head."""
        k, v = (expand_heads(x, self.site.heads) for x in (k, v))
        place = _places(active, max(int(active.sum(-1).amax()), 1))
        rows = rows_at(q, place.unsqueeze(2)).squeeze(2)
        parts = zip(rows.split(AT_ONCE, dim=2), place.split(AT_ONCE, dim=2), strict=True)
        # the backward pass makes the masks again
        heads = [checkpoint(self._attend_up_to, part, k, v, last, use_reentrant=False) for part, last in parts]
        return torch.cat(heads, dim=2)

    def _attend_up_to(self, q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
        """Attend with queries (B, H, c, K), each to the keys up to its position in `last` (B, H, c)."""
        mask = torch.arange(k.shape[2], device=q.device) <= last.unsqueeze(-1)
        return fused_attention(q, k, v, mask=mask, scale=self.scale, dropout=self.dropout)

    def _attend_active(self, q: Tensor, state: State, active: Tensor, others: Tensor) -> Tensor:
        """Return the outputs (B, N, H, V) of a step: attention if active (B, N, H), else `others`."""
        keys, values = written(state, "keys"), written(state, "values")
        if not self._skips_others(active):
            heads, _ = attend_step(q, keys, values, scale=self.scale)
            return torch.where(active.unsqueeze(-1), heads, others)
        if supports_cached(q, keys, values):
            heads = attend_cached(q, keys, values, scale=self.scale, visible=active.unsqueeze(-1))
            return torch.where(active.unsqueeze(-1), heads, others)
        chosen = active.flatten().nonzero().squeeze(1)
        row, head = chosen // self.site.heads, chosen % self.site.heads
        k, v = (
            x.flatten(0, 2)[row * x.shape[2] + head * x.shape[2] // self.site.heads].unsqueeze(1)
            for x in (keys, values)
        )  # (A, 1, t, K)
        heads, _ = attend(q.flatten(0, 2)[chosen, None, None].type_as(v), k.type_as(v), v, scale=self.scale)
        return others.flatten(0, 2).index_copy(0, chosen, heads[:, 0, 0]).view_as(others)

    def _skips_others(self, active: Tensor) -> bool:
        """Return whether a decoder leaves out inactive queries: on a CPU; on an accelerator the host would wait."""
        return active.device.type == "cpu"


def _places(active: Tensor, count: int) -> Tensor:
    """Return the positions (B, H, count) of active queries, in order, then other positions in heads with fewer."""
    return (~active).byte().argsort(dim=-1, stable=True)[..., :count]


def _spread_active(rows: Tensor, active: Tensor) -> Tensor:
    """Put rows (B, H, A, V) of the active queries at their positions (B, H, T); rows of other queries are arbitrary."""
    place = (active.cumsum(-1) - 1).clamp(min=0).unsqueeze(2)
    return rows_at(rows, place).squeeze(2)


def _mean(v: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean (B, G, 1, V) of the real tokens' values, in at least float32; zero without tokens."""
    if valid is None:
        return upcast(v).mean(2, keepdim=True)
    real = valid[:, None, :, None]
    return upcast(v).masked_fill(~real, 0.0).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)


QUERIES_AT_ONCE = 64
"""Queries whose samples are in memory at a time."""
MOST_KEYS = 128
"""Largest number of keys at which the sample is taken from all scores; with more, copying each query's keys is faster.
"""


class Samples:
    """The sampled keys of each query in each head: U(n) = max(min(c ceil(ln n), n), 1) of n keys; c is `factor`."""

    def __init__(self, heads: int, factor: int, key: int) -> None:
        """`key`: a number for seed, role and layer, from `random_key`."""
        self.heads, self.factor, self.key = heads, factor, key

    def most(self, keys: int) -> int:
        """Return U(n) for one number n of keys."""
        return max(min(self.factor * math.ceil(math.log(keys)), keys), 1)

    def size(self, keys: Tensor) -> Tensor:
        """Return U(n) for each of several numbers n; 1 for zero."""
        return (self.factor * keys.clamp(min=1).double().log().ceil().long()).minimum(keys).clamp(min=1)

    def picks(self, i: Tensor, keys: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """Return the keys sampled, (B or 1, H, c, slots), for queries at i (c,), and which of the slots are used.

        keys (B or 1, 1, c or 1): the number of keys for each query, from the first on.
        """
        head, slot = (torch.arange(count, device=i.device) for count in (self.heads, slots))
        draws = hashed(hashed(hashed(head + self.key).unsqueeze(-1) + i).unsqueeze(-1) + slot)  # (H, c, slots)
        keys = keys.unsqueeze(-1)
        size = self.size(keys)
        first = slot * keys // size
        width = (slot + 1) * keys // size - first
        used = (slot < size).expand(-1, *draws.shape)
        return (first + (draws * width >> 32)).masked_fill(~used, 0), used

    @torch.no_grad()
    def measures(self, q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
        """Return `spikiness` (B, H, T) of queries (B, H, T, K) at positions from 0, on their samples of k (B, G, S, K).

        keys (B or 1, 1, T or 1), as in `picks`.
        """
        parts = []
        k = k if k.shape[2] <= MOST_KEYS else expand_heads(k, self.heads).contiguous()  # once, not for each part
        position = torch.arange(q.shape[2], device=q.device)
        for i, rows in zip(position.split(QUERIES_AT_ONCE), q.split(QUERIES_AT_ONCE, dim=2), strict=True):
            query_keys = keys if keys.shape[2] == 1 else keys[:, :, i]
            picks, used = self.picks(i, query_keys, self.most(k.shape[2]))
            if k.shape[2] <= MOST_KEYS:
                scores = scores_of(rows, k, 1.0).gather(-1, picks.expand(len(q), -1, -1, -1))
            else:
                scores = (rows_at(k, picks) @ rows.unsqueeze(-1)).squeeze(-1)
            parts.append(spikiness(scores, used))
        return torch.cat(parts, dim=-1)


def spikiness(scores: Tensor, mask: Tensor) -> Tensor:
    """Return max - mean over the last axis, of the scores in the mask."""
    largest = scores.masked_fill(~mask, -torch.inf).amax(-1)
    return largest - scores.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1)


def earlier_larger(x: Tensor) -> Tensor:
    """Return how many earlier numbers are larger than each, (..., T) for x (..., T), in O(T log² T).

    Blocks of 1, 2, 4, ... are paired: each number is looked up among the sorted numbers of the block to its left.
    """
    length, size = x.shape[-1], 1
    padded = 1 << (length - 1).bit_length()
    x = F.pad(x, (0, padded - length), value=-torch.inf)
    counts = torch.zeros_like(x, dtype=torch.long)
    while size < padded:
        left, right = x.unflatten(-1, (-1, 2, size)).unbind(-2)
        not_larger = torch.searchsorted(left.sort(dim=-1).values, right.contiguous(), right=True)
        counts.unflatten(-1, (-1, 2, size))[..., 1, :] += size - not_larger
        size *= 2
    return counts[..., :length]
