"""Additive attention: a network with one hidden layer scores each pair of a query and a key.

Paper: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and Translate", ICLR 2015,
arXiv 1409.0473, section 3.1 and appendix A.1.2.
Departures: several heads, each with a network of its own; values are projected; `q_proj` and `k_proj` have biases,
whose sum is that of the hidden layer. Their weights do not start near zero as the paper's do: the hidden layer would be
linear there, and a query then changes all scores alike, which changes no weight. The score vector starts at zero as in
the paper, so that training starts from the mean of the values. The paper attends to the source alone: `published` is
the cross role, and the encoder and decoder roles are extensions.
Cost: O(T S A) time, where A is the width of the hidden layer; O(T S) memory: hidden layers are held for a part of the
queries at a time, and the backward pass computes them anew. A step costs O(t A).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.windowed_rows import scores_at_once
from mtkit.attention.options import Null, Positive
from mtkit.attention.slots import Projection


class Additive(ScoreAttention):
    """Attention whose scores are v . tanh(q + k), without a scale.

    additive_dim: width of the hidden layer of one head.
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"cross"})
    paper = "Bahdanau et al. 2014, arXiv 1409.0473"
    complexity = "O(T²)"
    growth = 2
    weights = True
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {
        "positions": frozenset({"alibi"}),  # the others are made for products of queries and keys
        "merge": None,
        "regularizer": None,
    }
    small: ClassVar[Mapping[str, Any]] = {"additive_dim": 5}

    def __init__(
        self, site: Site, *, additive_dim: Annotated[Positive | None, Null("that of the head, d_model / heads")] = None
    ) -> None:
        projection = Projection(site)
        projection.key_width = additive_dim or projection.key_width
        super().__init__(site, projection)
        self.score_vector = nn.Parameter(torch.zeros(site.heads, projection.key_width))

    def scores(self, pairs: Pairs) -> Tensor:
        """s_ij = v . tanh(q_i + k_j), in float32 at least."""
        q, k, v = (upcast(each) for each in (pairs.q, pairs.keys, self.score_vector))
        scores: Tensor = _Scores.apply(q, k, v)  # type: ignore[no-untyped-call]
        return scores

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same with the hidden layers of all pairs at once."""
        pairs = self.pairs(inputs.query, inputs.memory, inputs.context_valid)
        hidden = torch.tanh(pairs.q.unsqueeze(3) + pairs.keys.unsqueeze(2))  # (B, H, T, S, A)
        weights = self.softmax(torch.einsum("bhtsa,ha->bhts", hidden, self.score_vector), pairs)
        return Attended(self.merge_heads(self.outputs(weights, pairs)), weights=weights)


class _Scores(torch.autograd.Function):
    """v . tanh(q_i + k_j) of all pairs: q (B, H, T, A), k (B, H, S, A), v (H, A), all of one type."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        scores = q.new_empty(*q.shape[:3], k.shape[2])
        with torch.autocast(q.device.type, enabled=False):
            for some in _parts(q, k):
                scores[:, :, some] = (_hidden(q[:, :, some], k) @ v[:, None, :, None]).squeeze(-1)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with torch.autocast(q.device.type, enabled=False):
            for some in _parts(q, k):
                hidden, d_some = _hidden(q[:, :, some], k), d_scores[:, :, some]
                d_v += (d_some.unsqueeze(3) @ hidden).sum((0, 2, 3))
                slopes = hidden.square_().neg_().add_(1.0).mul_(d_some.unsqueeze(-1))  # but for the factor v
                d_q[:, :, some] = slopes.sum(3)
                d_k += slopes.sum(2)
        factor = v.unsqueeze(1)
        return d_q.mul_(factor), d_k.mul_(factor), d_v


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """All queries, in parts whose hidden layers are of limited size, or not larger than the keys."""
    size = max(scores_at_once(q.device) // max(k.numel(), 1), 1)
    for first in range(0, q.shape[2], size):
        yield slice(first, first + size)


def _hidden(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, T, S, A) of some of the queries."""
    return (q.unsqueeze(3) + k.unsqueeze(2)).tanh_()
