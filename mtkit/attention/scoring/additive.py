"""Additive attention: a network with one hidden layer scores each pair of a query and a key.

Paper: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and Translate", ICLR 2015,
arXiv 1409.0473, section 3.1 and appendix A.1.2.
Departures: several heads, each with its own network; values are projected; the biases of `q_proj` and `k_proj` add up
to the bias of the hidden layer. Unlike the paper's, the projections do not start near zero: the hidden layer would be
linear there, and a query would change all scores by the same amount, which changes no weight. As in the paper, the
score vector starts at zero, so that training starts from the mean of the values. The paper attends only to the source:
`published` is the cross role; the encoder and decoder roles are extensions.
Cost: O(T S A) time; A is the width of the hidden layer. Memory is O(T S), because hidden layers are computed for
some of the queries at a time and recomputed in the backward pass. A step costs O(t A).
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.cached_rows import rows_of
from mtkit.attention.kernels.cpu.threads import array_of_parameter, in_ranges, loops_take
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.tiled_softmax import scores_at_once
from mtkit.attention.options import Null, Positive
from mtkit.attention.slots import Projection, combining


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
    transposed = False
    # other positions need products of queries and keys
    slots = combining("merge", "regularizer", "nearby", positions={"alibi"})
    small: ClassVar[Mapping[str, Any]] = {"additive_dim": 5}

    def __init__(
        self,
        site: Site,
        *,
        additive_dim: Annotated[Positive | None, Null("the width of a head, d_model / heads")] = None,
    ) -> None:
        projection = Projection(site)
        projection.key_width = additive_dim or projection.key_width
        super().__init__(site, projection)
        self.score_vector = nn.Parameter(torch.zeros(site.heads, projection.key_width))

    def scores(self, pairs: Pairs) -> Tensor:
        """s_ij = v . tanh(q_i + k_j), in float32 or wider."""
        q, k, v = (upcast(x) for x in (pairs.q, pairs.keys, self.score_vector))
        scores: Tensor = _Scores.apply(q, k, v)  # type: ignore[no-untyped-call]
        return scores

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the limit of a head's scores: the sum of |v|."""
        return super().learned_numbers(inputs) | {"largest score": self.score_vector.abs().sum(-1)}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same with the hidden layers of all pairs at once."""
        pairs = self.pairs(inputs.query, inputs.memory, inputs.context_valid)
        hidden = torch.tanh(pairs.q.unsqueeze(3) + pairs.keys.unsqueeze(2))  # (B, H, T, S, A)
        weights = self.softmax(torch.einsum("bhtsa,ha->bhts", hidden, self.score_vector), pairs)
        return Attended(self.merge_heads(self.outputs(weights, pairs), inputs.query), weights=weights)


class _Scores(torch.autograd.Function):
    """v . tanh(q_i + k_j) of all pairs: q (B, H, T, A), k (B, H, S, A), v (H, A), all of one type."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        scores = q.new_empty(*q.shape[:3], k.shape[2])
        if loops_take(q, k, v) and scores.numel():
            from mtkit.attention.kernels.cpu.function_loops import write_additive_scores

            rows = *rows_of(q.unsqueeze(1)), *rows_of(k.unsqueeze(1)), array_of_parameter(v), scores.numpy()
            in_ranges(partial(write_additive_scores, *rows), len(q))
            return scores
        with torch.autocast(q.device.type, enabled=False):
            for part in _parts(q, k):
                scores[:, :, part] = (_hidden(q[:, :, part], k) @ v[:, None, :, None]).squeeze(-1)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        with torch.autocast(q.device.type, enabled=False):
            for part in _parts(q, k):
                hidden, d_part = _hidden(q[:, :, part], k), d_scores[:, :, part]
                d_v += (d_part.unsqueeze(3) @ hidden).sum((0, 2, 3))
                slopes = hidden.square_().neg_().add_(1.0).mul_(d_part.unsqueeze(-1))  # without the factor v
                d_q[:, :, part] = slopes.sum(3)
                d_k += slopes.sum(2)
        factor = v.unsqueeze(1)
        return d_q.mul_(factor), d_k.mul_(factor), d_v


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Split the queries into parts whose hidden layers fit a size limit; a part has at least one query."""
    size = max(scores_at_once(q.device) // max(k.numel(), 1), 1)
    for first in range(0, q.shape[2], size):
        yield slice(first, first + size)


def _hidden(q: Tensor, k: Tensor) -> Tensor:
    """Return the hidden layers (B, H, T, S, A) of these queries."""
    return (q.unsqueeze(3) + k.unsqueeze(2)).tanh_()
