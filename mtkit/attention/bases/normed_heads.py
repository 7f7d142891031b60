"""Score attention whose queries and keys may have a norm over the channels of each head."""

from torch import Tensor, nn

from mtkit.attention.bases.layers import ChannelNorm
from mtkit.attention.bases.query_blocks import QueryBlocks
from mtkit.attention.contract import Site


class NormedHeads(QueryBlocks):
    """Score attention; with `qk_norm`, queries and keys are normalised before they are rotated.

    All heads share the weights of the two norms.
    """

    def __init__(self, site: Site, *, qk_norm: bool) -> None:
        super().__init__(site)
        width = self.projection.key_width
        self.q_norm, self.k_norm = (ChannelNorm(width) if qk_norm else nn.Identity() for _ in range(2))

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """(B, T, D) to (B, H, T, K)."""
        return self._rotated(self.q_norm(self.projection.queries(self.q_proj(query))), position)

    def keys_values(self, memory: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, S, D) to keys (B, G, S, K) and values (B, G, S, V)."""
        k, v = self.projected(memory, self.k_proj, self.v_proj)
        return self._rotated(self.k_norm(self.projection.keys(k)), position), self.projection.values(v)
