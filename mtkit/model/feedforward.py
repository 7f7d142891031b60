"""The position-wise feed-forward sub-layer."""

from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.model.dropout import Dropout


class FeedForward(nn.Module):
    """Two linear maps with an activation between, on each position alone.

    relu: Vaswani et al., 2017, equation 2. gelu, swish (x sigmoid(x), also named silu): the same with that activation.
    swiglu: silu(x W) * (x V), then the second map (Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202,
    equation 6), with a third matrix.
    """

    def __init__(self, d_model: int, inner: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.activation = activation
        self.inner = nn.Linear(d_model, inner)
        self.gate = nn.Linear(d_model, inner) if activation == "swiglu" else None
        self.outer = nn.Linear(inner, d_model)
        self.dropout = Dropout(dropout)
        for linear in (self.inner, self.outer, self.gate):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        rows = x.flatten(0, -2)
        hidden = self.inner(rows)
        if self.gate is not None:
            hidden = F.silu(self.gate(rows)) * hidden
        elif self.activation == "relu":
            # in place: the backward pass of relu needs its result alone, that of the linear map not even that. On rows:
            # what is written in place must be no view, for whose gradients autograd makes four copies
            hidden = F.relu(hidden, inplace=True)
        else:
            hidden = F.gelu(hidden) if self.activation == "gelu" else F.silu(hidden)
        return self.outer(self.dropout(hidden)).unflatten(0, x.shape[:-1])
