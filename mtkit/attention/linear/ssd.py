"""State space duality: Mamba-2's state space as attention, whose heads share queries and keys and fade by content.

Paper: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
Duality", ICML 2024, arXiv 2405.21060, section 6 and listing 1.
Departures: the encoder role is an extension: a second scan from the end with the same parameters and a convolution in
its direction; the skip and the output gate are applied once, and the skip takes the values of the first scan. C, B and
X of the paper are queries, keys and values. Values are as wide as the model by default; the paper's are twice as wide
(value_expand 2). Dropout acts on the gated and normalised outputs.
Cost: O(T (c N + c V + N V)) time per head for chunks of c and states of N channels, O(T) memory. A step reads at
most 2 N V numbers per head, at any position.
"""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.layers import ChannelNorm
from mtkit.attention.contract import Inputs, Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.linear._decayed_attention import DecayedAttention, Outputs, Taps
from mtkit.attention.linear._decayed_sums import Terms
from mtkit.attention.linear._learned_rates import first_biases, first_rates
from mtkit.attention.options import Positive, refused
from mtkit.attention.slots import Projection, combining


class _SharedKeys(Projection):
    """Queries and keys shared by the heads of a group, values of each head ("multi-value")."""

    def __init__(self, site: Site, groups: int, width: int) -> None:
        super().__init__(site)
        if site.heads % groups:
            raise refused("groups", groups, f"divide the {site.heads} heads")
        self.heads = self.key_heads = groups
        self.key_width = width


class SSD(DecayedAttention):
    """Sums over earlier tokens with a step for each token: it scales what is added and how much the sums fade.

    state_width: width of queries and keys. groups: number of queries and keys that all heads share. value_expand: width
    of a head's values, in shares of the plain width. skip: whether a head adds its own value, times a learned number.
    short_conv: taps of the convolution on queries, keys and values; 0: none. norm: norm of all heads' outputs, after
    the gate. output_gate: activation of the output gate. chunk: number of positions computed at once.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"decoder"})
    paper = "Dao and Gu 2024, arXiv 2405.21060"
    slots = combining(positions={"rotary"}, regularizer={"disagreement"})
    silu = True
    convolution_bias = True
    variants = (
        {"norm": "none", "output_gate": "none", "short_conv": 0},
        {"groups": 2, "state_width": 5, "value_expand": 2.0, "norm": "layer", "output_gate": "sigmoid"},
    )

    def __init__(
        self,
        site: Site,
        *,
        state_width: Positive = 64,
        groups: Positive = 1,
        skip: bool = True,
        short_conv: Taps = 4,
        **shared: Unpack[Outputs],
    ) -> None:
        super().__init__(site, _SharedKeys(site, groups, state_width), short_conv=short_conv, **shared)
        if self.norm is not None:
            self.norm = ChannelNorm(self.projection.joined_width, shared.get("norm", "rms"))
        self.step_proj = nn.Linear(site.d_model, site.heads)
        nn.init.xavier_uniform_(self.step_proj.weight)
        with torch.no_grad():
            self.step_proj.bias.copy_(first_biases(site.heads))
        self.log_rate = nn.Parameter(first_rates(site.heads))
        self.skip = nn.Parameter(torch.ones(site.heads)) if skip else None

    def terms(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Terms:
        """Return the terms of M_ts = q_t . k_s exp(-e^A (D_s+1 + ... + D_t)) D_s, with the steps D of the tokens."""
        steps = self._steps(tokens)
        return Terms(q, k, v * steps, self._decays(steps))

    def decays_of(self, tokens: Tensor) -> Tensor:
        """Return -e^A D, (B, H, T, 1)."""
        return self._decays(self._steps(tokens))

    def finished(self, heads: Tensor, v: Tensor, query: Tensor) -> Tensor:
        """Return W_O n((o + d v) * g(W_g x)): the gate is before the norm, which is over all heads."""
        if self.skip is not None:
            heads = torch.addcmul(heads, v, self.skip.type_as(heads).view(-1, 1, 1))
        rows = self.gated(heads.transpose(1, 2).flatten(2), query)
        rows = rows if self.norm is None else self.norm(rows)
        output: Tensor = self.out_proj(F.dropout(rows.type_as(query), self.dropout))
        return output

    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the factors of the skip."""
        learned = super().learned_numbers(inputs)
        return learned if self.skip is None else {**learned, "skip": self.skip.detach().clone()}

    def _steps(self, tokens: Tensor) -> Tensor:
        """Return softplus(w x + b) of each head, (B, H, T, 1), in float32 at least."""
        return F.softplus(upcast(self.step_proj(tokens))).transpose(1, 2).unsqueeze(-1)

    def _decays(self, steps: Tensor) -> Tensor:
        return -self.log_rate.type_as(steps).exp().view(-1, 1, 1) * steps
