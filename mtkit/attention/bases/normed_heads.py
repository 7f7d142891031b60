"""Score attention whose queries and keys may have a norm over the channels of each head."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.query_blocks import QueryBlocks
from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import upcast


class RMSNorm(nn.Module):
    """RMS norm over the last axis with a weight, computed in float32 at least: x / sqrt(mean(x²) + eps) * weight.

    A zero vector stays zero. Paper: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width)."""
        normed = F.rms_norm(upcast(x), self.weight.shape, upcast(self.weight), self.eps)
        return normed.type_as(x)


class NormedHeads(QueryBlocks):
    """Score attention; with `qk_norm`, queries and keys are normalised before they are rotated.

    All heads share the weights of the two norms.
    """

    def __init__(self, site: Site, *, qk_norm: bool) -> None:
        super().__init__(site)
        width = self.projection.key_width
        self.q_norm, self.k_norm = (RMSNorm(width) if qk_norm else nn.Identity() for _ in range(2))

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """(B, T, D) to (B, H, T, K)."""
        return self._rotated(self.q_norm(self.projection.queries(self.q_proj(query))), position)

    def keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, S, D) to keys (B, G, S, K) and values (B, G, S, V)."""
        k, v = self.projected(memory, self.k_proj, self.v_proj)
        return self._rotated(self.k_norm(self.projection.keys(k)), position), self.projection.values(v)
