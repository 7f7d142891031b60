"""Base of random feature attention with and without gates; the two mechanisms cite the paper."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mtkit.attention.bases.feature_attention import FeatureAttention
from mtkit.attention.contract import ROLES, Inputs, Site, for_heads
from mtkit.attention.kernels.cpu.product import loops_multiply
from mtkit.attention.kernels.cpu.threads import in_ranges, loops_take
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.feature_sums import Keys
from mtkit.attention.kernels.reproducible import hashed, random_key
from mtkit.attention.options import OneOf, Positive, Within
from mtkit.device import to_device


def sine(projected: Tensor, factor: float) -> Tensor:
    """Return (sin w x, cos w x) times the factor for each direction w (equation 3). Differentiable once."""
    if projected.requires_grad or not loops_take(projected):
        features: Tensor = _Waves.apply(projected, factor)  # type: ignore[no-untyped-call]
        return features
    from mtkit.attention.kernels.cpu.function_loops import write_waves

    rows, out = projected.contiguous(), projected.new_empty(*projected.shape[:-1], 2 * projected.shape[-1])
    angles, waves = (x.view(-1, x.shape[-1]).numpy() for x in (rows, out))
    in_ranges(lambda first, last: write_waves(angles[first:last], waves[first:last], np.float32(factor)), len(angles))
    return out


class _Waves(torch.autograd.Function):
    """`sine`, which keeps only its result for the backward pass: it has the sines and cosines of the derivatives."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, factor: float) -> Tensor:
        waves = torch.cat([projected.sin(), projected.cos()], dim=-1).mul_(factor)
        ctx.save_for_backward(waves)
        return waves

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_waves: Tensor) -> tuple[Tensor, None]:
        (waves,) = ctx.saved_tensors
        (sines, cosines), (d_sines, d_cosines) = waves.chunk(2, -1), d_waves.chunk(2, -1)
        return (d_sines * cosines).addcmul_(d_cosines, sines, value=-1), None


def arc_cosine(projected: Tensor, factor: float) -> Tensor:
    """Return relu(w x) times the factor for each direction w."""
    return F.relu(projected) * factor


FEATURE_MAPS: dict[str, Callable[[Tensor, float], Tensor]] = {"sine": sine, "arc-cosine": arc_cosine}
"""Functions from products (..., D) with the directions, and a factor, to features."""


class RandomFeatureAttention(FeatureAttention):
    """Sums over keys of random features of unit vectors; `rfa` documents the options."""

    paper = "Peng et al. 2021, arXiv 2103.02143"
    complexity = "O(T D)"
    growth = 1
    undecayed = ("sigma",)
    small: ClassVar[dict[str, Any]] = {"features": 100, "pool": 3, "chunk": 3}  # fewer would divide by noise
    variants: ClassVar[tuple[dict[str, Any], ...]] = ({"feature_map": "arc-cosine"},)

    fixed: Tensor
    drawn: Tensor

    def __init__(
        self,
        site: Site,
        *,
        feature_map: Annotated[str, OneOf(FEATURE_MAPS)] = "sine",
        features: Positive = 128,
        tau: Annotated[float, Within(1e-3, 1e3)] = 1.0,
        learn_sigma: bool = True,
        pool: Positive = 200,
        chunk: Positive = 128,
    ) -> None:
        super().__init__(site, floor=1e-3, per_key=True, chunk=chunk)
        self.feature_map, self.features, self.tau, self.pool = feature_map, features, tau, pool
        heads, width = self.projection.key_heads, self.projection.key_width
        self.sigma = nn.Parameter(torch.ones(heads, width)) if learn_sigma else None
        self._key = random_key(site.seed, ROLES.index(site.role), site.layer)
        self.register_buffer("fixed", self._matrices(torch.zeros(heads, dtype=torch.long)))
        self.register_buffer("drawn", self._matrices(self._numbers(0)))

    def after_update(self, update: int, total_updates: int) -> None:
        """Pick the matrix that each head uses in training until the next update."""
        super().after_update(update, total_updates)
        self.drawn.copy_(to_device(self._matrices(self._numbers(update)), self.drawn.device))

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add sigma, the factors of a head's directions: 1 / sigma is the kernel's width in each component."""
        learned = super().learned_numbers(inputs)
        if self.sigma is not None:
            learned["sigma"] = for_heads(self.sigma, self.site.heads)
        return learned

    @property
    def feature_parameters(self) -> Sequence[Tensor]:
        """The directions (key heads, D, K)."""
        directions = (self.drawn if self.training else self.fixed) / self.tau
        return (directions if self.sigma is None else directions * self.sigma.unsqueeze(1),)

    def features_of(self, x: Tensor, *parameters: Tensor) -> Keys:
        """Map x / |x| to features in the directions (..., D, K) of its head; without a scale."""
        with torch.autocast(x.device.type, enabled=False):
            rows = F.normalize(upcast(x), dim=-1, eps=1e-6)
            projected = rows @ parameters[0].type_as(rows).mT
            return Keys(FEATURE_MAPS[self.feature_map](projected, self.features**-0.5))

    def looped_features(self, x: Tensor) -> Keys | None:
        if self.feature_map != "sine" or not loops_multiply(x, self.fixed):
            return None
        from mtkit.attention.kernels.cpu.random_feature_loops import features_of_rows

        factor = self.features**-0.5
        return Keys(features_of_rows(x, self.weights_of_loop(), self.features, waves=True, factor=factor)[0])

    def weights_of_loop(self) -> NDArray[np.float32]:
        from mtkit.attention.kernels.cpu.random_feature_loops import laid_out_directions

        return laid_out_directions(self.feature_parameters[0])

    @property
    def state_features(self) -> tuple[int, bool]:
        return self.features * (2 if self.feature_map == "sine" else 1), False

    def _numbers(self, update: int) -> Tensor:
        """Return each head's matrix number in the pool after an update."""
        return hashed(hashed(torch.arange(self.projection.key_heads) + self._key) + update) % self.pool

    def _matrices(self, numbers: Tensor) -> Tensor:
        """Draw the matrix (key heads, D, K) of normal directions with this number in the pool, for each head."""
        keys = hashed(hashed(torch.arange(len(numbers)) + self._key + 1) + numbers)  # + 1: unlike in `_numbers`
        shape = self.features, self.projection.key_width
        return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(key)) for key in keys.tolist()])
