"""What becomes of nodes of a mechanism's own (globals, spans) between one layer's attention and the next one's."""

from torch import Tensor, nn


class NodeUpdate(nn.Module):
    """Residual and norm around what the nodes read, then around a feed-forward, as tokens have in a post-norm layer.

    Its weights are the nodes' own, also where they share the projections of the tokens.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.feed_forward_norm = nn.LayerNorm(d_model)

    def forward(self, nodes: Tensor, read: Tensor) -> Tensor:
        """The nodes (..., D) for the layer above, from those of this layer and the output of their attention."""
        nodes = self.norm(nodes + read)
        updated: Tensor = self.feed_forward_norm(nodes + self.feed_forward(nodes))
        return updated
