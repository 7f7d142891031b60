"""Localness: each query predicts a position and the width of a bell around it, which weighs the keys.

Paper: Yang, Tu, Wong, Meng, Chao and Zhang, "Modeling Localness for Self-Attention Networks", EMNLP 2018,
arXiv 1810.10182.
Departures: in the decoder the length and the mean of the keys are over the tokens so far, because the target's length
would reveal later tokens. 0.1 is added to predicted widths, as in the authors' code: the width would be zero at length
1. The cross role is an extension, in which the length is the source's.
Cost: O(T S) time and memory, because the added bias rules out the fused kernel. A step costs O(t).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.caches import prefix_means
from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Attended, Inputs, Site, for_heads, packing, token_means
from mtkit.attention.kernels.dot_product import expand_heads, upcast
from mtkit.attention.options import Natural, Null, OneOf, Positive, refused

WINDOWS = ("query", "layer", "fixed")
FLOOR = 0.1
"""Smallest predicted width."""


class Localness(ScoreAttention):
    """Scaled dot-product attention with -2 ((j - P) / D)² added to its scores.

    The query predicts the centre P and, with window "query", the width D; with "layer" the mean of the keys predicts D,
    with "fixed" D is fixed_window. apply_layers: number of lower layers that add the bias; the others are full
    attention. local_heads: number of heads that add it.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"encoder", "decoder"})
    paper = "Yang et al. 2018, arXiv 1810.10182"
    small: ClassVar[Mapping[str, Any]] = {"fixed_window": 3}
    variants = ({"window": "layer"}, {"window": "fixed"}, {"apply_layers": 1}, {"window": "layer", "local_heads": 1})

    def __init__(
        self,
        site: Site,
        *,
        window: Annotated[str, OneOf(WINDOWS)] = "query",
        fixed_window: Positive = 10,
        apply_layers: Natural = 3,
        local_heads: Annotated[Positive | None, Null("all")] = None,
    ) -> None:
        super().__init__(site)
        self.window, self.fixed_window = window, fixed_window
        self.local_heads = site.heads if local_heads is None else local_heads
        if self.local_heads > site.heads:
            raise refused("local_heads", local_heads, f"be at most the {site.heads} heads")
        self.applies = site.layer < apply_layers
        if not self.applies:  # a layer of full attention
            return
        heads, width = self.local_heads, self.projection.key_width
        self.query_hidden = nn.Parameter(torch.empty(heads, width, width))
        self.centre_vector = nn.Parameter(torch.empty(heads, width, 1))
        nn.init.normal_(self.query_hidden, std=width**-0.5)
        nn.init.normal_(self.centre_vector, std=width**-0.5)
        if window != "fixed":  # at zero, D is half the number of keys
            self.width_vector = nn.Parameter(torch.zeros(heads, width, 1))
        if window == "layer":
            self.mean_hidden = nn.Parameter(torch.empty(heads, width, width))
            nn.init.normal_(self.mean_hidden, std=width**-0.5)

    def logits(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        """Return Q K^T / sqrt(K) - 2 ((j - P) / D)² in the local heads, in at least float32."""
        scores = upcast(self.scores(pairs))
        if not self.applies:
            return scores, None
        centre, width = self.bell(pairs)
        # in this form the backward pass keeps only one tensor of all pairs, the offsets
        offset = pairs.key_position.type_as(centre) * (1 / width) - centre / width
        local = torch.addcmul(scores[:, : self.local_heads], offset, offset, value=-2)
        if self.local_heads < self.site.heads:
            local = torch.cat([local, scores[:, self.local_heads :]], dim=1)
        return local, None

    def bell(self, pairs: Pairs) -> tuple[Tensor, Tensor | int]:
        """Return P and D of each local head, broadcastable to (B, local heads, T, 1), in at least float32."""
        count = _count(pairs)
        with torch.autocast(pairs.q.device.type, enabled=False):
            hidden = (upcast(pairs.q[:, : self.local_heads]) @ upcast(self.query_hidden)).tanh()
            centre = (count - 1) * (hidden @ upcast(self.centre_vector)).sigmoid()
            if self.window == "fixed":
                return centre, self.fixed_window
            if self.window == "layer":
                means = expand_heads(_means(pairs, count), self.site.heads)
                hidden = (means[:, : self.local_heads] @ upcast(self.mean_hidden)).tanh()
            return centre, count * (hidden @ upcast(self.width_vector)).sigmoid() + FLOOR

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add means of the predicted width D and, in the self roles, of the distance |P - i| of the centre."""
        learned = super().learned_numbers(inputs)
        if inputs is None or not self.applies:
            return learned
        pairs = self.pairs(inputs.query, inputs.memory, inputs.context_valid)
        centre, width = self.bell(pairs)
        means = {}
        if inputs.memory is None:
            means["distance to centre"] = (centre.squeeze(-1) - pairs.query_position).abs()
        if isinstance(width, Tensor):
            means["window width"] = width.squeeze(-1).expand(*pairs.q.shape[:1], -1, pairs.q.shape[2])
        return learned | {
            name: for_heads(token_means(x, inputs.query_valid), self.site.heads, first=0) for name, x in means.items()
        }

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute the equations of section 3 query by query: the bell -(j - P)² / (2 sigma²) with sigma = D / 2."""
        query = inputs.query
        pairs = self.pairs(query, inputs.memory, inputs.context_valid)
        logits = self.scores(pairs)
        batch, keys = len(query), pairs.values.shape[2]
        bias, places, bells = logits.new_zeros(logits.shape), [], []
        k = expand_heads(pairs.keys, self.site.heads)
        for b in range(batch if self.applies else 0):
            for i in range(query.shape[1]):
                real = keys if pairs.valid is None else int(pairs.valid[b].sum())
                n = i + 1 if self.site.causal else real
                for h in range(self.local_heads if n else 0):
                    hidden = torch.tanh(pairs.q[b, h, i] @ self.query_hidden[h])
                    centre = (n - 1) * torch.sigmoid(hidden @ self.centre_vector[h])
                    if self.window == "layer":
                        hidden = torch.tanh(k[b, h, :n].mean(0) @ self.mean_hidden[h])
                    fixed = self.window == "fixed"
                    width = self.fixed_window if fixed else n * torch.sigmoid(hidden @ self.width_vector[h]) + FLOOR
                    sigma = width / 2
                    places.append((b, h, i))
                    bells.append(-((pairs.key_position - centre) ** 2) / (2 * sigma**2))
        if places:
            bias[tuple(torch.tensor(places).T)] = torch.stack(bells)
        weights = self.softmax(logits + bias, pairs)
        return Attended(self.merge_heads(self.outputs(weights, pairs), query), weights=weights)


def _count(pairs: Pairs) -> Tensor | int:
    """Return the number of keys each query sees, broadcastable to (B, H, T, 1)."""
    if pairs.causal:
        return (pairs.query_position + 1).unsqueeze(-1)
    return pairs.values.shape[2] if pairs.valid is None else pairs.valid.sum(-1)[:, None, None, None]


def _means(pairs: Pairs, count: Tensor | int) -> Tensor:
    """Return the mean of the keys each query sees, (B, G, T or 1, K)."""
    if pairs.causal:
        return prefix_means(pairs.keys)
    keys = upcast(pairs.keys)
    if pairs.valid is not None:
        keys = keys.masked_fill(~pairs.valid[:, None, :, None], 0.0)
    return keys.sum(2, keepdim=True) / (max(count, 1) if isinstance(count, int) else count.clamp(min=1))
