"""The update of a mechanism's extra nodes (global tokens, spans) between one layer's attention and the next one's."""

from torch import Tensor, nn


class NodeUpdate(nn.Module):
    """Residual and norm around the nodes' attention, then around a feed-forward, as in a post-norm layer.

    The weights belong to the nodes, even if nodes share the projections of the tokens.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.feed_forward_norm = nn.LayerNorm(d_model)

    def forward(self, nodes: Tensor, read: Tensor) -> Tensor:
        """Return the nodes (..., D) for the next layer, from this layer's nodes and their attention's output."""
        nodes = self.norm(nodes + read)
        updated: Tensor = self.feed_forward_norm(nodes + self.feed_forward(nodes))
        return updated
