"""Hard-coded attention: each head sums the values around a fixed offset from its query, under a fixed Gaussian.

Paper: You, Sun and Iyyer, "Hard-Coded Gaussian Attention for Neural Machine Translation", ACL 2020, arXiv 2005.00742,
sections 3.1 and 4.
Departures: the Gaussian is cut off at `truncate` standard deviations; the published code computes all pairs; at 5
the rest weighs less than 1e-6. In the cross role the centre is at most the last source token, because beyond it a long
translation would see nothing. The ratio of lengths is counted in training, not before it. The projections have biases.
Weights are the density itself and do not add up to 1, as in the published code; see `renormalise`.
Cost: O(T n) time and memory for n positions within the cut-off (11 at the defaults), without queries and keys. A step
costs O(n), at any position; in the decoder role it keeps n tokens, in the cross role it serves all hypotheses at once.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, start_cache, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.pattern_attention import lengths_of
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import upcast, weighted
from mtkit.attention.options import MOST, ListOf, Null, Within, numbers, refused
from mtkit.attention.prior._window_sums import slide, sum_windows
from mtkit.attention.slots import combining


class LengthRatio(nn.Module):
    """The ratio of source to target tokens, counted in training and saved with the model; 1 before training."""

    tokens: Tensor
    new_tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        # source and target; integers, which no cast of the model rounds
        self.register_buffer("tokens", torch.ones(2, dtype=torch.long))
        # empty between updates, when checkpoints are written
        self.register_buffer("new_tokens", torch.zeros(2, dtype=torch.long), persistent=False)

    @property
    def value(self) -> Tensor:
        """The ratio, a scalar in float64."""
        return self.tokens[0].double() / self.tokens[1].clamp(min=1)

    @torch.no_grad()
    def gather(self, source: Tensor, source_valid: Tensor | None, target: Tensor, target_valid: Tensor | None) -> None:
        """Count real tokens for the next update; only in training, and not when activations are recomputed."""
        if not self.training or torch._C._current_graph_task_id() != -1:  # a backward pass is running
            return
        for place, x, valid in ((0, source, source_valid), (1, target, target_valid)):
            self.new_tokens[place] += x.shape[:2].numel() if valid is None else valid.sum()

    @torch.no_grad()
    def update(self) -> None:
        """Add the tokens counted since the last update, summed over all processes."""
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self.new_tokens)
        self.tokens += self.new_tokens
        self.new_tokens.zero_()


Offset = Within(-1000, 1000)


class HardCoded(HeadAttention):
    """Sums of values under fixed Gaussians around positions near the query's own.

    offsets: centres of the heads relative to the query's position, repeated over the heads. std: standard deviation, in
    tokens. truncate: standard deviations at which the Gaussian is cut off. renormalise: whether the weights of the
    visible tokens add up to 1. ratio: source tokens per target token, only for the cross role; a counted ratio is saved
    with the model.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "You et al. 2020, arXiv 2005.00742"
    complexity = "O(T n)"
    growth = 1
    sequential_operations = "O(1)"
    longest_path = "O(T / n)"
    weights = True
    slots = combining("merge", "nearby", projection={"multi-query", "grouped-query"}, regularizer={"disagreement"})
    small: ClassVar[Mapping[str, Any]] = {"truncate": 3.0}
    variants = (
        {"offsets": "-3,0"},
        {"offsets": [2, -4]},
        {"std": 2.5},
        {"ratio": 1.7},
        {"ratio": 0.6, "renormalise": True},
    )
    offset: Tensor

    def __init__(
        self,
        site: Site,
        *,
        offsets: Annotated[
            Annotated[int, Offset]
            | Annotated[str | Sequence[int], ListOf(Offset, "one after the other over the heads")]
            | None,
            Null("-1,0 in the decoder role, -1,1 in the others"),
        ] = None,
        std: Annotated[float, Within(0.1, 1000)] = 1.0,
        truncate: Annotated[float, Within(1, 10)] = 5.0,
        renormalise: bool = False,
        ratio: Annotated[
            Annotated[float, Within(0.01, 100)] | None, Null("1 until training has counted tokens")
        ] = None,
    ) -> None:
        super().__init__(site)
        del self.q_proj, self.k_proj
        self.reads_query = site.role != "cross" or self.merge_reads_query  # there, else, only the position matters
        self.centres = _by_head(site, offsets)
        self.std, self.renormalise, self.ratio = std, renormalise, ratio or 1.0
        self.span = truncate * std * (1 + 1e-6)  # includes integer distances at the edge, whatever the rounding
        self.register_buffer("offset", torch.tensor(self.centres), persistent=False)
        self.counted = LengthRatio() if site.role == "cross" and ratio is None else None
        if self.counted is not None:
            self.learns_by_steps = False

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the ratio of source to target tokens in training, in one row, if it is counted."""
        learned = super().learned_numbers(inputs)
        if self.counted is not None:
            learned["source tokens per target token"] = self.counted.value.unsqueeze(0)
        return learned

    def attend(self, inputs: Inputs) -> Attended:
        """Sum over the tokens near the query's position, or near the corresponding source position."""
        query, memory = inputs.query, inputs.memory
        v, valid = self._values(inputs.context), inputs.context_valid
        lengths, position = lengths_of(v, valid), torch.arange(query.shape[1], device=query.device)
        if memory is not None and self.counted is not None:
            self.counted.gather(memory, inputs.memory_valid, query, inputs.query_valid)
        heads = self._near(v, valid) if memory is None else self._near_in_source(v, lengths, position)
        needs_map = inputs.need_weights or self.regularizes_weights
        weights = self._map(position, v, lengths) if needs_map else None
        return self.result(inputs, heads.type_as(v), v, weights)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        if inputs.memory is None:
            shape = self.cache_shapes["values"]
            return start_cache(inputs.batch_size, inputs.hypotheses, self.v_proj.weight, values=shape), None
        v = self._values(inputs.memory)
        values = upcast(v).transpose(1, 2).contiguous()  # (B, S, G, V), so that no step copies
        lengths = lengths_of(v, inputs.memory_valid).expand(len(v))
        return {"shared": {"values": values, "lengths": lengths}, "count": 0}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        query = inputs.query
        t, hypotheses = state["count"], query.shape[1]
        position, weights = torch.full((1,), t, device=query.device), None
        if self.site.role == "cross":
            state = {**state, "count": t + 1}
            v, lengths = state["shared"]["values"].transpose(1, 2), state["shared"]["lengths"]
            heads = self._near_in_source(v, lengths, position).type_as(query)
            heads = heads.expand(-1, -1, hypotheses, -1) if self.merge_reads_query else heads
            output = self.merge_heads(heads, query).expand(-1, hypotheses, -1)
            weights = self._map(position, v, lengths) if inputs.need_weights else None
        else:
            window = 1 - self._reach()[0]
            state = append(state, window=window, values=self._values(query).transpose(1, 2))
            values = written(state, "values", window=window)  # (B, N, G, L, V)
            age = (t - torch.arange(values.shape[3], device=query.device)) % window  # of each place of the ring
            row = self._weights(-age - self.offset.unsqueeze(-1), None, values)  # (H, L)
            with torch.autocast(query.device.type, enabled=False):
                v = upcast(values).flatten(0, 1)
                heads = weighted(row.unsqueeze(1).expand(len(v), -1, -1, -1), v)  # (B*N, H, 1, V)
            output = self.merge_heads(heads.type_as(query), query).view_as(query)
            weights = self._map(position, values[:, 0], position + 1, keys=t + 1) if inputs.need_weights else None
        return Attended(output, weights=None if weights is None else weights.expand(-1, -1, hypotheses, -1)), state

    def after_update(self, update: int, total_updates: int) -> None:
        super().after_update(update, total_updates)
        if self.counted is not None:
            self.counted.update()

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        v, valid = self._values(inputs.context), inputs.context_valid
        weights = self._map(torch.arange(inputs.query.shape[1], device=inputs.query.device), v, lengths_of(v, valid))
        return Attended(self.merge_heads(weighted(weights, v), inputs.query), weights=weights)

    def _values(self, tokens: Tensor) -> Tensor:
        """Map (B, S, D) to (B, G, S, V)."""
        return self.projection.values(self.projected(tokens, self.v_proj)[0])

    def _near(self, v: Tensor, valid: Tensor | None) -> Tensor:
        """Return the heads' outputs (B, H, T, V) in the self roles."""
        first, last = self._reach(v.shape[2])
        distance = torch.arange(first, last + 1, device=v.device) - self.offset.unsqueeze(-1)
        weights = self._densities(distance, v)  # (H, n)
        valid = None if self.site.causal else valid  # a causal token never sees padding, which comes later
        if valid is not None:
            v = v.masked_fill(~valid[:, None, :, None], 0.0)
        heads = slide(v, weights, first, self.dropout)
        if self.renormalise:
            counted = v.new_ones(1, v.shape[2]) if valid is None else valid
            total = slide(counted[:, None, :, None].type_as(heads), weights, first)
            heads = heads / total.where(total > 0, 1.0)
        return heads

    def _near_in_source(self, v: Tensor, lengths: Tensor, position: Tensor) -> Tensor:
        """Return the heads' outputs (B, H, T, V) at target position (T,), from the source's v (B, G, S, V)."""
        lengths, length = lengths.expand(len(v)), v.shape[2]
        centre = self._centre(position, lengths)
        most = min(math.floor(2 * self.span) + 1, length)
        first = (centre - self.span).ceil().clamp(0, length - most)
        key = first.unsqueeze(-1) + torch.arange(most, device=v.device)  # (B, H, T, n)
        weights = self._weights(key - centre.unsqueeze(-1), key < lengths[:, None, None, None], v)
        weights = F.dropout(weights, self.dropout) if self.dropout else weights
        return sum_windows(v, key.long(), weights)

    def _map(self, position: Tensor, v: Tensor, lengths: Tensor, keys: int | None = None) -> Tensor:
        """Return the weights (B, H, T, S) of all keys; S is the length of v (B, G, S, V), or `keys` if given."""
        key = torch.arange(v.shape[2] if keys is None else keys, device=position.device)
        seen = key < lengths[:, None, None, None]
        if self.site.causal:
            seen = key <= position.unsqueeze(-1)
        weights = self._weights(key - self._centre(position, lengths).unsqueeze(-1), seen, v)
        return weights.expand(len(v), -1, -1, -1)

    def _centre(self, position: Tensor, lengths: Tensor) -> Tensor:
        """Return the means (B or 1, H, T) of the Gaussians, in float64: products with large positions round float32."""
        if self.site.role != "cross":
            return (position + self.offset.unsqueeze(-1)).double().unsqueeze(0)
        ratio = self.ratio if self.counted is None else self.counted.value
        centre = ratio * position.double() + self.offset.unsqueeze(-1)  # (H, T)
        return centre.minimum(lengths[:, None, None] - 1.0)

    def _weights(self, distance: Tensor, seen: Tensor | None, like: Tensor) -> Tensor:
        """Return the weights of keys (..., n) at these distances from the centre; zero for keys not in `seen`."""
        weights = self._densities(distance, like) * (1.0 if seen is None else seen)
        return F.normalize(weights, p=1, dim=-1, eps=1e-30) if self.renormalise else weights

    def _densities(self, distance: Tensor, like: Tensor) -> Tensor:
        """Return N(distance; 0, std^2) up to the cut-off, zero beyond, in the type of `like`, at least float32."""
        distance = distance.to(upcast(like).dtype)
        density = (-0.5 * (distance / self.std).square()).exp() / (self.std * math.sqrt(2 * math.pi))
        return density * (distance.abs() <= self.span)

    def _reach(self, length: int = MOST) -> tuple[int, int]:
        """Return the distances of the first and last key that any head sees in a sequence of this length; zero is among
        them.
        """
        far, most = math.floor(self.span), max(length - 1, 0)
        last = 0 if self.site.causal else min(max(max(self.centres) + far, 0), most)
        return -min(max(far - min(self.centres), 0), most), last


def _by_head(site: Site, offsets: int | str | Sequence[int] | None) -> list[int]:
    """Return the offset of each head. Raises: MtkitError for offsets that the site cannot have."""
    if offsets is None:
        offsets = ([-1, 0] if site.causal else [-1, 1])[: site.heads]
    cycle = [offsets] if isinstance(offsets, int) else numbers(offsets)
    if not 1 <= len(cycle) <= site.heads:
        raise refused("offsets", offsets, f"have one value for each of the {site.heads} heads, or fewer, which repeat")
    if site.causal and max(cycle) > 0:
        raise refused("offsets", offsets, "be at most 0 in the decoder role: later tokens are not seen")
    return [cycle[head % len(cycle)] for head in range(site.heads)]
