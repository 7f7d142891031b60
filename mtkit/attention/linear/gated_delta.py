"""Gated delta rule: a memory that fades, and that replaces the value stored under a key; with Kimi Delta Attention.

Paper: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025, arXiv
2412.06464, section 3; with gate=channel, Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture",
2025, arXiv 2510.26692, equations 1 to 10.
Departures: the encoder role is an extension: a second scan from the end with the same parameters and a convolution in
its direction; it reads before it writes. The cross role is an extension: the source is written once, in order, gates
included, and every query, which passes no convolution, reads the result. Queries are not divided by the square root of
K: the norm of the outputs removes a factor. Rates are drawn from 1 to 16; the authors draw from 0, whose logarithm is
not finite. Dropout acts on the gated and normalised outputs.
Cost: O(T (c K + c V + K V)) time for chunks of c, with gate=channel O(T K log c) exponentials more; O(T) memory. A step
reads at most 2 K V numbers per head, at any position.
"""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.layers import unit
from mtkit.attention.bases.recent_sums import read_sums_of
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing, token_means
from mtkit.attention.kernels.dot_product import expand_heads, upcast
from mtkit.attention.linear._decayed_attention import GATES, DecayedAttention, Expand, Norm, Taps, unbiased
from mtkit.attention.linear._decayed_sums import Terms, read_literally, sums_after
from mtkit.attention.linear._learned_rates import first_biases, first_rates
from mtkit.attention.options import Null, OneOf, Positive, Within

EPS = 1e-6
"""Added to squared lengths of queries and keys."""


class GatedDelta(DecayedAttention):
    """Sums that fade by a learned gate, and into which each key writes only the correction of its value.

    gate: one decay for each "head" (Gated DeltaNet), or for each "channel" of the keys (Kimi Delta Attention).
    gate_floor: lowest logarithm of a decay, which then is gate_floor times a sigmoid. negative_eigenvalues: whether a
    key may replace up to twice its value, so that a memory can change its sign. key_expand, value_expand: width of a
    head's keys and values, in shares of the plain width. short_conv: taps of the convolution on queries, keys and
    values; 0: none. norm: norm of a head's output. output_gate: activation of the output gate, which has rank V with
    gate=channel. chunk: number of positions computed at once.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"decoder"})
    paper = "Yang et al. 2024, arXiv 2412.06464"
    unrounded = True
    roundable = frozenset({"gate_proj", "out_proj"})
    silu = True
    variants = (
        {"gate": "channel"},
        {"gate": "channel", "gate_floor": -5.0, "negative_eigenvalues": True, "value_expand": 2.0},
        {"norm": "none", "output_gate": "none", "short_conv": 0},
        {"gate_floor": -5.0, "norm": "layer", "output_gate": "sigmoid", "key_expand": 0.5},
    )

    def __init__(
        self,
        site: Site,
        *,
        gate: Annotated[str, OneOf(("head", "channel"))] = "head",
        gate_floor: Annotated[Annotated[float, Within(-100.0, -1e-3)] | None, Null("no floor")] = None,
        negative_eigenvalues: bool = False,
        key_expand: Expand = 1.0,
        value_expand: Expand = 1.0,
        short_conv: Taps = 4,
        norm: Norm = "rms",
        output_gate: Annotated[
            Annotated[str, OneOf((*GATES, "none"))] | None, Null("silu, sigmoid with gate=channel")
        ] = None,
        chunk: Positive = 32,
    ) -> None:
        by_channel = gate == "channel"
        super().__init__(
            site,
            key_expand=key_expand,
            value_expand=value_expand,
            short_conv=short_conv,
            norm=norm,
            output_gate=output_gate or ("sigmoid" if by_channel else "silu"),
            chunk=chunk,
        )
        self.by_channel = by_channel
        self.floor, self.most = gate_floor, 2.0 if negative_eigenvalues else 1.0
        heads, rank, width = site.heads, self.projection.value_width, site.memory_width or site.d_model
        self.beta_proj = unbiased(width, heads)
        decays = heads * (self.projection.key_width if by_channel else 1)
        self.decay_proj: nn.Module = unbiased(width, decays)
        if by_channel:
            self.decay_proj = nn.Sequential(unbiased(width, rank), unbiased(rank, decays))
            if self.gate_proj is not None:
                joined = self.projection.joined_width
                self.gate_proj = nn.Sequential(unbiased(site.d_model, rank), unbiased(rank, joined))
        self.decay_bias = nn.Parameter(first_biases(decays))
        self.log_rate = nn.Parameter(first_rates(heads) if gate_floor is None else torch.zeros(heads))

    def terms(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Terms:
        """Return queries and keys of length 1, values, and the tokens' decays and shares of replacement."""
        return Terms(unit(q, EPS), unit(k, EPS), v, self.decays_of(tokens), self._beta(tokens))

    def decays_of(self, tokens: Tensor) -> Tensor:
        """Return -e^A softplus(w x + b), (B, H, T, 1 or K); with a floor, floor * sigmoid(e^A (w x + b))."""
        logits = self._exact(self.decay_proj, tokens)
        logits = (logits + self.decay_bias.type_as(logits)).unflatten(-1, (self.site.heads, -1)).transpose(1, 2)
        rate = self.log_rate.type_as(logits).exp().view(-1, 1, 1)
        return -rate * F.softplus(logits) if self.floor is None else self.floor * (rate * logits).sigmoid()

    def attend(self, inputs: Inputs) -> Attended:
        """The equation of the class; in the cross role, every query reads the sums after the source."""
        if inputs.memory is None:
            return super().attend(inputs)
        terms, v = self._source_terms(inputs.memory, inputs.memory_valid)
        heads = self._read_source(inputs.query, sums_after(terms, self.chunk))
        losses = self.losses(inputs, heads, v)
        return Attended(self.finished(heads, v, inputs.query), losses=losses)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        if inputs.memory is None:
            return super().begin(inputs)
        terms, _ = self._source_terms(inputs.memory, inputs.memory_valid)
        return {"shared": {"sums": sums_after(terms, self.chunk)}}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        if "shared" not in state:
            return super().advance(inputs, state)
        heads = self._read_source(inputs.query, state["shared"]["sums"])
        return Attended(self.finished(heads, heads, inputs.query)), state

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The recurrence, one position after the other."""
        if inputs.memory is None:
            result: Attended = super().naive(**vars(inputs))
            return result
        terms, v = self._source_terms(inputs.memory, inputs.memory_valid)
        _, sums = read_literally(terms)
        return Attended(self.finished(self._read_source(inputs.query, sums), v, inputs.query))

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the mean share of a stored value that a token replaces."""
        learned = super().learned_numbers(inputs)
        if inputs is not None:
            learned["replaced share"] = token_means(self._beta(inputs.context).squeeze(-1), inputs.context_valid)
        return learned

    def _beta(self, tokens: Tensor) -> Tensor:
        return self.most * self._exact(self.beta_proj, tokens).sigmoid().transpose(1, 2).unsqueeze(-1)

    def _exact(self, linear: nn.Module, tokens: Tensor) -> Tensor:
        """Return linear(tokens) without autocast, in float32 at least."""
        with torch.autocast(tokens.device.type, enabled=False):
            return upcast(linear(tokens.type_as(self.q_proj.weight)))

    def _source_terms(self, memory: Tensor, valid: Tensor | None) -> tuple[Terms, Tensor]:
        """Return the terms and values of a source; its queries are not read."""
        p, heads = self.projection, self.site.heads
        k, v = self.mixed(self.projections(memory, self.k_proj, self.v_proj), valid)
        k, v = expand_heads(p.keys(k), heads), expand_heads(p.values(v), heads)
        terms = self.terms(k, k, v, memory)
        return terms if valid is None else terms.masked(valid), v

    def _read_source(self, query: Tensor, sums: Tensor) -> Tensor:
        """Return what target tokens (B, T, D) read from the sums (B, H, K, V) after the source, (B, H, T, V)."""
        (q,) = self.projections(query, self.q_proj)
        with torch.autocast(query.device.type, enabled=False):
            q = unit(self.projection.queries(F.silu(upcast(q))), EPS)
            return read_sums_of(sums.unsqueeze(1), None, expand_heads(q, self.site.heads).unsqueeze(2)).squeeze(2)
