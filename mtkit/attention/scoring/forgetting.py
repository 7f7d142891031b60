"""Forgetting attention: a gate of each token, computed from its content, lowers the scores of all keys before it.

Paper: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", ICLR 2025, arXiv 2503.02130,
equations 5 to 8: f_t = sigmoid(w_f . x_t + b_f) in each head, and the score of key j for query i is
q_i . k_j / sqrt(K) + sum of log f_l over l = j + 1, ..., i. A key's own gate does not act on it, the query's does. The
equations were checked against the authors' code and flash-linear-attention, not against the paper's text.
Departures: the output gate and the shifted keys and values of the paper's "Pro" block are left out: merge=gated is an
output gate. With `qk_norm`, heads share the weights of the norms. In the encoder role, an extension, the gates between
two tokens act in both directions: the sum is over min(i, j) + 1, ..., max(i, j). There is no cross role, because a
query has no distance to a source token. The authors' pruning of forgotten keys is left out.
Cost: O(T²) time. Memory is O(T), because scores are computed for some of the queries at a
time and again in the backward pass, or O(T²) if weights are requested. A step costs O(t).

Sums of log f fall without bound, so they are in float64: in float32, a difference of two sums near -2900 is off by
5e-5. No value of padding matters, because padding is never between two real tokens.
"""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.query_blocks import NormedHeads
from mtkit.attention.bases.score_attention import Pairs
from mtkit.attention.contract import Attended, Inputs, Site, packing, token_means
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import Within


class Forgetting(NormedHeads):
    """Scaled dot-product attention whose scores fall by the gates of the tokens between key and query.

    gate_bias: initial bias of the gates; at 0 a token keeps half of what is before it, at 5, for weights of a model
    without gates, 99%. qk_norm: whether queries and keys have an RMS norm over the channels of a head.
    """

    roles = frozenset({"encoder", "decoder"})
    published = frozenset({"decoder"})
    paper = "Lin et al. 2025, arXiv 2503.02130"
    variants = ({"gate_bias": 5.0},)

    def __init__(
        self, site: Site, *, gate_bias: Annotated[float, Within(-30.0, 30.0)] = 0.0, qk_norm: bool = False
    ) -> None:
        super().__init__(site, qk_norm=qk_norm)
        self.forget_proj = nn.Linear(site.d_model, site.heads)
        nn.init.normal_(self.forget_proj.weight, std=0.02)
        nn.init.constant_(self.forget_proj.bias, gate_bias)

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        """Return keys, values, and the logarithms of the gates (B, H, S, 1), in float32 at least."""
        return {**super().columns(memory, position), "log_gates": self.log_gates(memory).mT.unsqueeze(-1)}

    def log_gates(self, tokens: Tensor) -> Tensor:
        """Return log f (B, T, H) of tokens (B, T, D)."""
        weight, bias = self.forget_proj.weight, self.forget_proj.bias
        with torch.autocast(tokens.device.type, enabled=False):
            return F.logsigmoid(F.linear(upcast(tokens), upcast(weight), upcast(bias)))

    def logits(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        """Return the scores plus c_i - c_j, c being the sum of log f up to a token; with the sign changed if j > i."""
        sums = pairs.columns["log_gates"].squeeze(-1).double().cumsum(-1)  # (B, H, S)
        log_share = sums.index_select(-1, pairs.query_position).unsqueeze(-1) - sums.unsqueeze(-2)  # (B, H, T, S)
        scores = upcast(self.scores(pairs))
        if not self.site.causal:
            later = pairs.key_position > pairs.query_position.unsqueeze(-1)
            log_share = log_share * (1 - 2 * later.type_as(scores))
        return scores + log_share.type_as(scores), None

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the mean gate of each head: the share of what is before a token that it keeps."""
        learned = super().learned_numbers(inputs)
        if inputs is None:
            return learned
        gates = self.log_gates(inputs.query).exp().transpose(1, 2)
        return learned | {"forget gate": token_means(gates, inputs.query_valid)}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same with the product of the gates between each two tokens."""
        pairs = self.pairs(inputs.query, None, inputs.query_valid)
        gates = torch.sigmoid(self.forget_proj(inputs.query)).transpose(1, 2)  # (B, H, T)
        rows = [torch.ones_like(gates[..., :1])]  # the products of row i, for j = 0, ..., i
        for i in range(1, gates.shape[2]):
            rows.append(torch.cat([rows[-1] * gates[..., i : i + 1], rows[0]], -1))
        products = torch.stack([F.pad(row, (0, gates.shape[2] - row.shape[-1]), value=1.0) for row in rows], -2)
        if not self.site.causal:
            products = products * products.mT
        weights = self.softmax(self.scores(pairs) + products.log(), pairs)
        return Attended(self.merge_heads(self.outputs(weights, pairs), inputs.query), weights=weights)
