"""Performer: softmax attention estimated by random features of queries and keys, in time linear in the length.

Paper: Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, arXiv 2009.14794 (positive and relu
features, orthogonal draws), and "Masked Language Modeling for Proteins via Linearly Scalable Long-Context
Transformers", 2020, arXiv 2006.03555 (trigonometric features).
Departures: nothing is added to exponential features; the constant that the published code adds (1e-4 or 1e-6) would let
later keys change earlier outputs through the stabiliser. The stabiliser is the largest exponent of the visible keys, in
the decoder of the keys so far; it cancels exactly. The magnitude of a denominator relative to the stabiliser is at
least 1e-20, and at least 0.1 for trigonometric features, whose products can be negative. The heads of a layer share its
directions. There are no weights, so attention dropout acts on the outputs of the heads.
Cost: O(T M V) time, O(T M) memory for M features. A step reads at most 2 M V numbers per head, at any position. It is
faster than softmax attention if T is well above M. The estimate is accurate only for small norms of queries and keys;
otherwise trigonometric features are mostly noise, more so in bfloat16. They are meant for study.
"""

import math
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtkit.attention.bases.feature_attention import FeatureAttention
from mtkit.attention.contract import ROLES, Site
from mtkit.attention.kernels.cpu.product import loops_multiply
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.feature_sums import Keys
from mtkit.attention.kernels.reproducible import random_key
from mtkit.attention.options import Natural, Null, OneOf, Positive


def positive(projected: Tensor, half_square: Tensor) -> Keys:
    """Return exp(w x - |x|²/2) / sqrt(M) for each direction w (lemma 1)."""
    top, constant = projected.detach().amax(-1, keepdim=True), half_square.detach()
    # features are relative to the largest, so |x|² affects only their gradient
    shift = (constant - half_square) - (top + math.log(projected.shape[-1]) / 2)
    return Keys((projected + shift).exp_(), top - constant)


def hyperbolic(projected: Tensor, half_square: Tensor) -> Keys:
    """Return `positive` features for each direction and its opposite (lemma 1, cosh form)."""
    return positive(torch.cat([projected, -projected], dim=-1), half_square)


def trig(projected: Tensor, half_square: Tensor) -> Keys:
    """Return exp(|x|²/2) (cos w x, sin w x) / sqrt(M) (section 2.3)."""
    waves = torch.cat([projected.cos(), projected.sin()], dim=-1)
    return Keys(waves * projected.shape[-1] ** -0.5, half_square)


def relu(projected: Tensor, half_square: Tensor) -> Keys:
    """Return relu(w x) / sqrt(M) + 0.001 (the published code's generalised attention)."""
    return Keys(projected.relu() * projected.shape[-1] ** -0.5 + 1e-3)


FEATURE_MAPS = {"positive": positive, "hyperbolic": hyperbolic, "trig": trig, "relu": relu}
"""Functions from products (..., M) with the directions and half squared norms (..., 1) to features and their log scale.
"""


class Performer(FeatureAttention):
    """Random features whose products estimate the softmax's exponentials (FAVOR+).

    feature_map: "positive" (FAVOR+, 1 feature per direction), "hyperbolic" (positive features of each direction and of
    its opposite, 2 per direction), "trig" (trigonometric, 2 per direction) or "relu" (1 per direction, which does not
    estimate the softmax). features: number of random directions. orthogonal: whether directions are drawn in orthogonal
    blocks. redraw: updates between draws of new directions; 0: never. chunk: number of positions computed at once in
    the decoder role.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Choromanski et al. 2021, arXiv 2009.14794"
    complexity = "O(T M)"
    growth = 1
    small: ClassVar[dict[str, Any]] = {"features": 5, "chunk": 3}
    variants = (
        {"feature_map": "hyperbolic"},
        {"feature_map": "relu"},
        {"feature_map": "trig", "features": 100, "chunk": 32},  # with fewer, the denominators are mostly noise
    )

    directions: Tensor
    draws: Tensor

    def __init__(
        self,
        site: Site,
        *,
        feature_map: Annotated[str, OneOf(FEATURE_MAPS)] = "positive",
        features: Annotated[Positive | None, Null("K ln K")] = None,
        orthogonal: bool = True,
        redraw: Natural = 1000,
        chunk: Positive = 64,
    ) -> None:
        super().__init__(site, floor=1e-1 if feature_map == "trig" else 1e-20, chunk=chunk)
        width = self.projection.key_width
        if features is None:
            features = max(1, round(width * math.log(width)))
        self.feature_map = FEATURE_MAPS[feature_map]
        self.orthogonal = orthogonal
        self.redraw = redraw
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        self.register_buffer("directions", torch.empty(features, width))
        self._draw()

    def after_update(self, update: int, total_updates: int) -> None:
        """Draw new directions after every `redraw` updates; they are constant in between and in evaluation."""
        super().after_update(update, total_updates)
        if self.redraw and update % self.redraw == 0:
            self.draws += 1
            self._draw()

    def features_of(self, x: Tensor, *parameters: Tensor) -> Keys:
        """Apply the feature map to x / K^(1/4), so that products of features estimate exp(q . k / sqrt(K))."""
        with torch.autocast(x.device.type, enabled=False):
            rows = upcast(x).reshape(-1, x.shape[-1])  # one product for all heads, because a head has few rows
            projected = rows @ (self.directions.type_as(rows) * self.scale**0.5).T
            half_square = rows.square().sum(-1, keepdim=True) * (self.scale / 2)
            factors = (projected, half_square)
            return self.feature_map(*(factor.view(*x.shape[:-1], factor.shape[-1]) for factor in factors))

    def looped_features(self, x: Tensor) -> Keys | None:
        if self.feature_map is not positive or not loops_multiply(x, self.directions):
            return None
        from mtkit.attention.kernels.cpu.random_feature_loops import features_of_rows

        count, rows = len(self.directions), x * self.scale**0.5
        return Keys(*features_of_rows(rows, self.weights_of_loop(), count, waves=False, factor=count**-0.5))

    def weights_of_loop(self) -> NDArray[np.float32]:
        from mtkit.attention.kernels.cpu.random_feature_loops import laid_out_directions

        return laid_out_directions(self.directions.unsqueeze(0))

    @property
    def state_features(self) -> tuple[int, bool]:
        """M or 2 M features; relu features have no scale, all others have one."""
        keys = self.features_of(self.directions.new_zeros(1, 1, 1, self.directions.shape[1]))
        return keys.features.shape[-1], keys.scale is not None

    def _draw(self) -> None:
        """Draw directions from seed, role, layer and the number of draws before: the same in all processes."""
        key = random_key(self.site.seed, ROLES.index(self.site.role), self.site.layer, int(self.draws))
        generator = torch.Generator().manual_seed(key)
        self.directions.copy_(draw_directions(*self.directions.shape, orthogonal=self.orthogonal, generator=generator))


def draw_directions(count: int, width: int, *, orthogonal: bool, generator: torch.Generator) -> Tensor:
    """Return (count, width), each row a standard normal vector; if orthogonal, blocks of `width` rows are orthogonal.

    A block is a uniformly distributed orthogonal matrix whose rows are scaled to the norms of other normal vectors.
    """
    normal = torch.randn(count, width, generator=generator, dtype=torch.float64)
    if not orthogonal:
        return normal
    blocks = torch.randn(-(-count // width), width, width, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(blocks)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # without this the factor is not uniform
    return q.transpose(-1, -2).flatten(0, 1)[:count] * normal.norm(dim=-1, keepdim=True)
