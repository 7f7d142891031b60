"""Retention: linear attention whose heads forget at fixed rates, each at its own.

Paper: Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023, arXiv 2307.08621,
equations 3 to 8.
Departures: the encoder role is an extension: a second scan from the end, so that tokens at distance d share the weight
gamma^d. The paper also divides the decays by the root of their sum and the scores by max(|their sum|, 1); torchscale,
its authors' code, takes sums of absolute values instead. Both are factors of a row of a head, which the norm after them
removes except for its epsilon. They are left out; the epsilon is 1e-5 on the sums themselves. The norm divides by the
root mean square (torchscale; the paper has a group norm) of one head of one token, never of several positions. Rotary
angles are RoFormer's, without the last one of torchscale's. Values are as wide as keys by default; the paper's
are twice as wide (value_expand 2). Dropout acts on the gated and normalised outputs.
Cost: O(T (c K + c V + K V)) time for chunks of c, O(T) memory. A step reads at most 2 K V numbers per head, at any
position.
"""

from typing import Annotated, Unpack

import torch
from torch import Tensor, nn

from mtkit.attention.contract import Site
from mtkit.attention.linear._decayed_attention import DecayedAttention, Heads
from mtkit.attention.linear._decayed_sums import Terms
from mtkit.attention.options import Within
from mtkit.attention.positions import Rotary
from mtkit.attention.slots import OWN_VECTORS, combining


class Retention(DecayedAttention):
    """Sums over earlier tokens that fade by a fixed factor per head at every token.

    decay_base: head h keeps 1 - 2^-(decay_base + h) of its sums at a token, h from 0. rotary: whether queries and keys
    are rotated by their position. key_expand, value_expand: width of a head's keys and values, in shares of the plain
    width. short_conv: taps of a convolution on queries, keys and values; 0: none. norm: norm of a head's output.
    output_gate: activation of the output gate. chunk: number of positions computed at once.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"decoder"})
    paper = "Sun et al. 2023, arXiv 2307.08621"
    slots = combining(projection=OWN_VECTORS, regularizer={"disagreement"})
    variants = (
        {"norm": "none", "output_gate": "none"},
        {"short_conv": 3, "value_expand": 2.0, "norm": "layer", "output_gate": "sigmoid"},
        {"decay_base": 1.0, "key_expand": 0.5},
    )

    def __init__(
        self,
        site: Site,
        *,
        decay_base: Annotated[float, Within(1.0, 60.0)] = 5.0,
        rotary: bool = True,
        **shared: Unpack[Heads],
    ) -> None:
        super().__init__(site, **shared)
        self.decay_base = decay_base
        if rotary:
            self.positions = Rotary(site, self.projection.key_width)
        for linear, gain in (
            (self.q_proj, 2**-2.5), (self.k_proj, 2**-2.5), (self.v_proj, 2**-2.5), (self.out_proj, 0.5)
        ):  # fmt: skip
            nn.init.xavier_uniform_(linear.weight, gain=gain)
        if isinstance(self.gate_proj, nn.Linear):
            nn.init.xavier_uniform_(self.gate_proj.weight, gain=2**-2.5)

    def terms(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Terms:
        """Return scaled queries, keys and values, which fade by gamma_h = 1 - 2^-(decay_base + h)."""
        # in float64, and not a buffer, which a cast of the model to bfloat16 would round to 1
        heads = torch.arange(q.shape[1], dtype=torch.float64, device=q.device)
        decay = torch.log1p(-torch.exp2(-self.decay_base - heads)).type_as(q)
        return Terms(q * self.scale, k, v, decay.view(1, -1, 1, 1).expand(*q.shape[:3], 1))
