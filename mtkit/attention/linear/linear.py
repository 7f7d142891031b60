"""Linear attention: a product of features replaces the exponential of a product, so that keys can be summed first.

Paper: Katharopoulos, Vyas, Pappas and Fleuret, "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention", ICML 2020, arXiv 2006.16236, equations 4 to 12. Feature maps: hedgehog of Zhang et al., "The Hedgehog & the
Porcupine: Expressive Linear Attentions with Softmax Mimicry", ICLR 2024, arXiv 2402.04347; taylor of Arora et al.,
"Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff" (Based), ICML 2024, arXiv 2402.18668.
Departures: none with the paper's map. Products of elu1 and relu features do not approximate softmax attention; scores
are not divided by the square root of K. The sources of hedgehog differ: exponentials, as in its equation, are the
default, computed exactly with a scale for each key, and with a denominator of at least 1e-20 of the largest key's; the
authors' later code also has two softmaxes side by side (feature_norm softmax). Its loss against softmax weights, which
converts trained models, is left out. Taylor features hold each product of two numbers once; the published fast path
holds it twice. There are no weights, so attention dropout acts on the outputs of the heads.
Cost: O(T M V) time for M features, O(T) memory. A step reads at most 2 M V numbers per head, at any position. M is K
for elu1 and relu, 2 K for hedgehog and 1 + K + K (K + 1) / 2 for taylor, 153 where K is 16.
"""

import math
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.feature_attention import FeatureAttention
from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.feature_sums import FEATURE_MAPS, Keys
from mtkit.attention.options import Null, OneOf, Positive, Within
from mtkit.attention.registry import fill
from mtkit.attention.slots import Projection

TAYLOR_WIDTH = 16
"""Width of the queries and keys of a head for taylor features, or less where heads are narrower."""


class LinearAttention(FeatureAttention):
    """Sums over keys of features, instead of the softmax.

    feature_map: "elu1" (the paper's elu(x) + 1), "relu", "hedgehog" (exponentials of learned combinations of a head's
    numbers and of their opposites) or "taylor" (products that are 1 + s + s^2 / 2 for a score s). feature_width: width
    K of a head's queries and keys. feature_norm: hedgehog's "exp" or "softmax", after which each key weighs the same in
    sum. eps: number added to the denominator, except to sums of exponentials. chunk: number of positions computed at
    once in the decoder role.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Katharopoulos et al. 2020, arXiv 2006.16236"
    complexity = "O(T)"
    growth = 1
    small: ClassVar[dict[str, Any]] = {"chunk": 3}
    variants = (
        {"feature_map": "relu"},
        {"feature_map": "hedgehog"},
        {"feature_map": "hedgehog", "feature_norm": "softmax"},
        {"feature_map": "taylor", "feature_width": 3},
    )

    def __init__(
        self,
        site: Site,
        *,
        feature_map: Annotated[str, OneOf((*FEATURE_MAPS, "hedgehog", "taylor"))] = "elu1",
        feature_width: Annotated[Positive | None, Null("the projection's, for taylor at most 16")] = None,
        feature_norm: Annotated[str, OneOf(("exp", "softmax"))] = "exp",
        eps: Annotated[float, Within(1e-12, 1.0)] = 1e-6,
        chunk: Positive = 64,
    ) -> None:
        projection = fill("projection", site) or Projection(site)
        if feature_width is None and feature_map == "taylor":
            feature_width = min(TAYLOR_WIDTH, projection.key_width)
        projection.key_width = feature_width or projection.key_width
        self.scaled = feature_map == "hedgehog" and feature_norm == "exp"
        # relative to its largest key, a sum of exponentials may be far below eps
        super().__init__(
            site, projection, eps=0.0 if self.scaled else eps, floor=1e-20 if self.scaled else 0.0, chunk=chunk
        )
        self.feature_map = feature_map
        self.query_map: HeadMaps | None = None
        self.key_map: HeadMaps | None = None
        if feature_map == "hedgehog":
            self.query_map = HeadMaps(projection.heads, projection.key_width)
            self.key_map = HeadMaps(projection.key_heads, projection.key_width)

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, H, T, K), with hedgehog's map."""
        q = super().queries(query, position)
        return q if self.query_map is None else self.query_map(q)

    def keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map (B, S, D) to keys (B, G, S, K), with hedgehog's map, and values (B, G, S, V)."""
        k, v = super().keys_values(memory, position)
        return k if self.key_map is None else self.key_map(k), v

    def features_of(self, x: Tensor, *parameters: Tensor) -> Keys:
        """Return phi(x); hedgehog's exponentials have a scale."""
        x = upcast(x)
        if self.scaled:
            return exponentials(x)
        if self.feature_map == "hedgehog":
            return Keys(torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1))
        if self.feature_map == "taylor":
            return Keys(taylor(x))
        return Keys(FEATURE_MAPS[self.feature_map](x))

    @property
    def state_features(self) -> tuple[int, bool]:
        width = self.projection.key_width
        counts = {"hedgehog": 2 * width, "taylor": 1 + width + width * (width + 1) // 2}
        return counts.get(self.feature_map, width), self.scaled


class HeadMaps(nn.Module):
    """A square map for each head, W x + b, at first the identity."""

    undecayed = ("bias",)

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width).repeat(heads, 1, 1))
        self.bias = nn.Parameter(torch.zeros(heads, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, H, T, K) to (B, H, T, K), in float32 at least: its exponential is taken."""
        with torch.autocast(x.device.type, enabled=False):
            x = upcast(x)
            return torch.einsum("bhtk,hjk->bhtj", x, self.weight.type_as(x)) + self.bias.type_as(x)


def exponentials(x: Tensor) -> Keys:
    """Return [exp(x), exp(-x)] of x (..., K) relative to the largest, whose logarithm is the scale (Hedgehog)."""
    top = x.detach().abs().amax(-1, keepdim=True)
    return Keys(torch.cat([x - top, -x - top], dim=-1).exp(), top)


def taylor(x: Tensor) -> Tensor:
    """Return features (..., 1 + K + K (K + 1) / 2) of x (..., K) with products 1 + s + s^2 / 2, s = q . k / sqrt(K).

    They are 1, each x_a / K^(1/4), each x_a^2 / sqrt(2 K), and x_a x_b / sqrt(K) for a < b (Based).
    """
    x = x * x.shape[-1] ** -0.25
    one, two = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
    pairs = x.index_select(-1, one) * x.index_select(-1, two)
    return torch.cat([torch.ones_like(x[..., :1]), x, x.square() * math.sqrt(0.5), pairs], dim=-1)
