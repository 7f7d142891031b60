"""Label-smoothed cross-entropy, fused with the output projection and computed a chunk of rows at a time.

The smoothing is the form of Szegedy et al. (2016), which `torch.nn.functional.cross_entropy` has too: with l the
log-probabilities over V pieces and y the right one, (1 - e) * -l_y + e/V * sum_v -l_v.

A chunk's logits are made, used for the loss and for both gradients, and overwritten by the next chunk's, so that
nothing of the size tokens x V is ever kept. The gradients are made in the forward pass: the backward pass then needs no
second product with the V-wide matrix, and three products, the least possible, serve one training step. Over a chunk's
logits go two reads for the maxima and one softmax besides: the smoothing needs none, because the sum of a row's logits
is one product with the weight's column sum, and its gradient is the same for all rows and all pieces.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Logits held at a time: about what the last cache of a CPU holds, and what fills a GPU."""


@dataclass(frozen=True)
class TokenLoss:
    """The loss of N target tokens."""

    smoothed: Tensor
    """Scalar: the sum of the label-smoothed cross-entropy, in nats; what the gradient is taken of."""
    nll: Tensor
    """(N,): the plain negative log-likelihood of each token, in nats, without a gradient."""

    @property
    def tokens(self) -> int:
        """How many tokens the sums are over."""
        return len(self.nll)


def token_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, *, smoothing: float, chunk_rows: int | None = None
) -> TokenLoss:
    """The loss of predicting target (N,) from hidden (N, D) with logits hidden @ weight.T; weight (V, D).

    Only rows of real tokens may be given. Under autocast the products run in autocast's type and all sums in float32;
    otherwise everything runs in the type of `weight`. `chunk_rows`: rows of logits held at a time.
    """
    if chunk_rows is None:
        chunk_rows = max(1, CHUNK_ELEMENTS.get(hidden.device.type, 4 << 20) // weight.shape[0])
    smoothed, nll = _ChunkedCrossEntropy.apply(hidden, weight, target, smoothing, chunk_rows)
    return TokenLoss(smoothed, nll)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the smoothed loss and (N,) plain losses; both gradients are ready when forward ends."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, smoothing: float, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        with torch.autocast(device, enabled=False):
            gradients = _Gradients(hidden, weight) if any(ctx.needs_input_grad[:2]) else None
            smoothed, nll = _run(hidden, weight.to(dtype), target, smoothing, chunk_rows, gradients)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale, gradients = upstream[0], ctx.gradients
        return gradients.hidden * scale, gradients.weight * scale, None, None, None


class _Gradients:
    """Where the gradients of the sum gather."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.hidden = torch.empty_like(hidden)  # (N, D)
        self.weight = torch.zeros_like(weight)  # (V, D)


def _run(
    hidden: Tensor, weight: Tensor, target: Tensor, smoothing: float, chunk_rows: int, gradients: _Gradients | None
) -> tuple[Tensor, Tensor]:
    """Both losses, chunk by chunk, all sums at least in float32; fills `gradients` where given."""
    rows, vocabulary, dtype = len(hidden), len(weight), weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    nll = torch.empty(rows, dtype=wide, device=hidden.device)
    mean_logit = torch.empty_like(nll)
    mean_weight = weight.sum(0, dtype=wide) / vocabulary  # (D,); its product with a row is the mean of that row's logits
    buffer = weight.new_empty(min(chunk_rows, rows), vocabulary)
    probabilities = buffer if dtype == wide else buffer.to(wide)
    for first in range(0, rows, chunk_rows):
        chunk = slice(first, first + chunk_rows)
        states, gold = hidden[chunk].to(dtype), target[chunk].unsqueeze(1)
        here = probabilities[: len(states)]
        logits = torch.mm(states, weight.t(), out=buffer[: len(states)])
        gold_logit, peak = logits.gather(1, gold).squeeze(1), logits.amax(1)
        torch.softmax(logits, 1, dtype=wide, out=here)
        # the largest probability is 1 over the sum of exp(logit - peak)
        nll[chunk] = peak.to(wide) - here.amax(1).log() - gold_logit
        mean_logit[chunk] = states.to(wide) @ mean_weight
        if gradients is not None:
            here.scatter_add_(1, gold, torch.full_like(gold, smoothing - 1.0, dtype=wide))
            error = here.to(dtype)
            torch.mm(error, weight, out=states)
            gradients.hidden[chunk] = torch.sub(states.to(wide), mean_weight, alpha=smoothing)
            _add_product(gradients.weight, error.t(), hidden[chunk].to(dtype))
    if gradients is not None:
        gradients.weight -= hidden.sum(0, dtype=wide) * (smoothing / vocabulary)
    # log-sum-exp - (1 - e) gold - e mean, with log-sum-exp = nll + gold
    return nll, mean_logit
