"""The base of mechanisms that read decayed sums of keys and values, in the self roles and in a step.

A mechanism states what its heads read and write (`terms`). The sums take the place of a cache. In the encoder role,
which is an extension, a second scan runs from the end, with the same parameters; a token reads itself in the first one
only.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.layers import ChannelNorm, xavier_linear
from mtkit.attention.bases.recent_sums import fixed_recent, start_recent
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing, token_means
from mtkit.attention.kernels.dot_product import by_hypotheses, expand_heads, position_of, upcast
from mtkit.attention.linear._decayed_sums import (
    Terms,
    read_both_ways,
    read_causal,
    read_literally,
    read_newest,
    read_next,
)
from mtkit.attention.linear._short_convolution import ShortConvolution
from mtkit.attention.options import OneOf, Positive, Within
from mtkit.attention.registry import fill
from mtkit.attention.slots import OWN_VECTORS, Projection, combining

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}
NORMS = ("rms", "layer", "none")

Expand = Annotated[float, Within(0.125, 8.0)]
"""Width of a head's keys or values, in shares of the projection's width."""
Norm = Annotated[str, OneOf(NORMS)]
Gate = Annotated[str, OneOf((*GATES, "none"))]
Taps = Annotated[int, Within(0, 64)]


unbiased = partial(xavier_linear, bias=None)


class Outputs(TypedDict, total=False):
    """Options of all mechanisms with decayed sums, which they pass on: `**shared: Unpack[Outputs]`."""

    value_expand: Expand
    norm: Norm
    output_gate: Gate
    chunk: Positive


class Heads(Outputs, total=False):
    """The same with options of queries and keys."""

    key_expand: Expand
    short_conv: Taps


class DecayedAttention(HeadAttention):
    """W_O(n(o) * g(W_g x)); o reads decayed sums over the prefix, and in the encoder also over the suffix."""

    complexity = "O(T)"
    growth = 1
    sequential_operations = "O(T / c)"
    longest_path = "O(1)"
    keeps_shapes = True
    # the output stage takes the merge's place; other positions add to scores, which do not exist here
    slots = combining(positions={"rotary"}, projection=OWN_VECTORS, regularizer={"disagreement"})
    silu: ClassVar[bool] = False
    """Whether queries, keys and values pass SiLU also without a convolution."""
    convolution_bias: ClassVar[bool] = False
    by_channel: bool = False
    """Whether each channel of a head's keys decays at its own rate."""

    def __init__(
        self,
        site: Site,
        projection: Projection | None = None,
        *,
        key_expand: float = 1.0,
        value_expand: float = 1.0,
        short_conv: int = 0,
        norm: str = "rms",
        output_gate: str = "silu",
        chunk: int = 64,
    ) -> None:
        projection = projection or fill("projection", site) or Projection(site)
        projection.key_width = max(1, round(projection.key_width * key_expand))
        projection.value_width = max(1, round(projection.value_width * value_expand))
        super().__init__(site, projection)
        self.chunk = chunk
        self.norm = None if norm == "none" else ChannelNorm(projection.value_width, norm)
        self.activation = GATES.get(output_gate)
        self.gate_proj: nn.Module | None = None
        if self.activation is not None:
            self.gate_proj = unbiased(site.d_model, projection.joined_width)
        widths = projection.widths[site.role == "cross" :]
        self.convolution = ShortConvolution(sum(widths), short_conv, bias=self.convolution_bias) if short_conv else None

    def terms(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Terms:
        """Return what heads read and write, from q, k and v (B, H, T, ...) of the tokens (B, T, D)."""
        raise NotImplementedError

    def decays_of(self, tokens: Tensor) -> Tensor | None:
        """Return the logarithms (B, H, T, 1 or K) of the shares kept at tokens (B, T, D); None: fixed ones."""
        return None

    def attend(self, inputs: Inputs) -> Attended:
        """The equation of the class, in time and memory linear in T."""
        query, valid = inputs.query, inputs.query_valid
        projected = self.projections(query, self.q_proj, self.k_proj, self.v_proj)
        forward, v = self._terms(projected, query, valid)
        if self.site.causal:
            heads = read_causal(forward, self.chunk)
        else:
            heads = read_both_ways(forward, self._backward(forward, projected, query, valid), self.chunk)
        return Attended(self.finished(heads, v, query), losses=self.losses(inputs, heads, v))

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        p, like = self.projection, upcast(self.q_proj.weight)
        rows = inputs.batch_size, inputs.hypotheses
        if self.by_channel:
            state: State = {"sums": like.new_zeros(*rows, self.site.heads, p.key_width, p.value_width), "count": 0}
        else:
            shape = {"groups": self.site.heads, "features": p.key_width, "width": p.value_width}
            state = {"recent": start_recent(*rows, like, **shape, fading=True), "count": 0}
        if self.convolution is not None:
            taps, channels = self.convolution.weight.shape
            state["inputs"] = like.new_zeros(*rows, taps - 1, channels)
        return state, None

    def fixed_state(self, state: State, hypotheses: int, steps: int) -> State | None:
        if "recent" in state:
            state = {**state, "recent": fixed_recent(state["recent"])}
        return super().fixed_state(state, hypotheses, steps)

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """The same equation for the newest token of each hypothesis; O(K V) per head, at any position."""
        query = inputs.query
        rows = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        projected = self.projections(rows, self.q_proj, self.k_proj, self.v_proj)
        state = {**state, "count": state["count"] + 1}
        mixed: Sequence[Tensor] | None = None
        if self.convolution is not None:
            newest = upcast(torch.cat([*projected], dim=-1))
            convolved, kept = self.convolution.newest(state["inputs"].flatten(0, 1), newest)
            state["inputs"] = kept.unflatten(0, query.shape[:2])
            mixed = convolved.split([x.shape[-1] for x in projected], dim=-1)
        position = position_of(state["count"] - 1, query.device)
        terms, v = self._terms(projected, rows, None, mixed=mixed, position=position)
        if self.by_channel:
            heads = read_next(terms, state["sums"].flatten(0, 1))
            return Attended(self.finished(heads, v, rows).squeeze(1).unflatten(0, query.shape[:2])), state
        of_hypotheses = Terms(*(None if x is None else by_hypotheses(x, query.shape[1]) for x in terms))  # type: ignore[arg-type]
        heads, state["recent"] = read_newest(of_hypotheses, state["recent"])
        return Attended(self.finished(heads, by_hypotheses(v, query.shape[1]), query)), state

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The recurrences, one position after the other."""
        query, valid = inputs.query, inputs.query_valid
        projected = self.projections(query, self.q_proj, self.k_proj, self.v_proj)
        forward, v = self._terms(projected, query, valid)
        heads, _ = read_literally(forward)
        if not self.site.causal:
            backward = self._backward(forward, projected, query, valid)
            flipped = Terms(*(None if x is None else x.flip(2) for x in backward))  # type: ignore[arg-type]
            heads = heads + read_literally(flipped, excluding=True)[0].flip(2)
        return Attended(self.finished(heads, v, query))

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the mean share of the sums that a head keeps at a token, if tokens decide it."""
        learned = super().learned_numbers(inputs)
        decays = None if inputs is None else self.decays_of(inputs.context)
        if inputs is not None and decays is not None:
            learned["kept share"] = token_means(decays.exp().mean(-1), inputs.context_valid)
        return learned

    def finished(self, heads: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Return the layer's output (B, T, D) from the reads and the values (B, H, T, V) of its heads."""
        rows = heads.transpose(1, 2)
        rows = (rows if self.norm is None else self.norm(rows)).flatten(2)
        output: Tensor = self.out_proj(F.dropout(self.gated(rows, query).type_as(query), self.dropout))
        return output

    def gated(self, rows: Tensor, query: Tensor) -> Tensor:
        """Return rows (B, T, H V) times the output gates of the tokens (B, T, D)."""
        if self.gate_proj is None or self.activation is None:
            return rows
        return rows * self.activation(upcast(self.gate_proj(query)))

    def projections(self, tokens: Tensor, *maps: nn.Linear) -> Sequence[Tensor]:
        """Return the outputs (B, T, width) of linear maps; without autocast if the mechanism must not round."""
        if not self.unrounded:
            return self.projected(tokens, *maps)
        with torch.autocast(tokens.device.type, enabled=False):
            return self.projected(tokens.type_as(self.q_proj.weight), *maps)

    def mixed(self, projected: Sequence[Tensor], valid: Tensor | None, *, reverse: bool = False) -> Sequence[Tensor]:
        """Return projections after the convolution and SiLU, (B, T, width) each, in float32 at least."""
        if self.convolution is None:
            return [F.silu(upcast(x)) if self.silu else upcast(x) for x in projected]
        widths = [x.shape[-1] for x in projected]
        if valid is not None:
            projected = [x.masked_fill(~valid.unsqueeze(-1), 0.0) for x in projected]
        firsts = accumulate(widths[:-1], initial=0)
        return [self.convolution(x, first=at, reverse=reverse) for x, at in zip(projected, firsts, strict=True)]

    def _terms(
        self,
        projected: Sequence[Tensor],
        tokens: Tensor,
        valid: Tensor | None,
        *,
        mixed: Sequence[Tensor] | None = None,
        position: Tensor | None = None,
        reverse: bool = False,
    ) -> tuple[Terms, Tensor]:
        """Return the terms of tokens (B, T, D) whose padding neither writes nor decays, and values (B, H, T, V).

        mixed: the results of `mixed`, in a step.
        """
        p, heads = self.projection, self.site.heads
        with torch.autocast(tokens.device.type, enabled=False):
            q, k, v = mixed or self.mixed(projected, valid, reverse=reverse)
            q, k = (self._rotated(x, position) for x in (p.queries(q), p.keys(k)))
        q, k, v = (expand_heads(x, heads) for x in (q, k, p.values(v)))
        terms = self.terms(q, k, v, tokens)
        return terms if valid is None else terms.masked(valid), v

    def _backward(self, forward: Terms, projected: Sequence[Tensor], query: Tensor, valid: Tensor | None) -> Terms:
        """Return the terms of the scan from the end."""
        return forward if self.convolution is None else self._terms(projected, query, valid, reverse=True)[0]
