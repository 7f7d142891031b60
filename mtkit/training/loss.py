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
from torch.autograd.function import once_differentiable

from mtkit.model.network import Network, Output
from mtkit.training.feed import Inputs
from mtkit.training.optimization.optimizer import Precision

CHUNK_ELEMENTS = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Logits held at a time: about what the last cache of a CPU holds, and what fills a GPU."""

STEP = 64
"""Rows of logits come in multiples of this, the last ones zeros that count for nothing. A CPU library writes code
for each number of rows in a bfloat16 product, which takes longer than the product."""


@dataclass(frozen=True)
class TokenLoss:
    """Summed and per-token loss of N target tokens."""

    smoothed: Tensor
    """Scalar: the sum of the label-smoothed cross-entropy, in nats; what the gradient is taken of."""
    nll: Tensor
    """(N,): the plain negative log-likelihood of each token, in nats, without a gradient."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the sums."""
        return len(self.nll)


def batch_loss(model: Network, inputs: Inputs, precision: Precision, *, smoothing: float) -> tuple[TokenLoss, Output]:
    """The loss of a batch's real target tokens in one forward pass, and the pass's output."""
    with precision.autocast():
        hidden, output = predicting(model, inputs)
        return token_loss(*model.factors(hidden), inputs.target, smoothing=smoothing), output


def predicting(model: Network, inputs: Inputs) -> tuple[Tensor, Output]:
    """The vectors (N, D) that predict the batch's real target tokens, and the forward pass's output."""
    output = model(
        inputs.source,
        inputs.target_in,
        source_valid=inputs.source_valid,
        source_lengths=inputs.source_lengths,
        target_valid=inputs.target_valid,
        task=inputs.task,
    )
    return output.hidden.flatten(0, 1).index_select(0, inputs.places), output


def token_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, *, smoothing: float, chunk_rows: int | None = None
) -> TokenLoss:
    """The loss of predicting target (N,) from hidden (N, D) with logits hidden @ weight.T; weight (V, D).

    Only rows of real tokens may be given. Under autocast the products run in autocast's type and all sums in float32;
    otherwise everything runs in the type of `weight`. `chunk_rows`: rows of logits held at a time.
    """
    if chunk_rows is None:
        chunk_rows = max(STEP, CHUNK_ELEMENTS.get(hidden.device.type, 4 << 20) // weight.shape[0] // STEP * STEP)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    smoothed, nll = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, smoothing, chunk_rows, wanted
    )
    return TokenLoss(smoothed, nll)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the smoothed loss and (N,) plain losses; both gradients are ready when forward ends."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, smoothing: float, chunk_rows: int, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
        with torch.autocast(device, enabled=False):
            states, gold = (padded(each, min(STEP, chunk_rows)) for each in (hidden, target))
            gradients = _Gradients(states, weight, trained=ctx.needs_input_grad[1]) if wanted else None
            smoothed, nll = _run(states, weight.to(dtype), gold, len(hidden), smoothing, chunk_rows, gradients)
        ctx.gradients, ctx.dtype, ctx.rows = gradients, weight.dtype, len(hidden)
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale, gradients = upstream[0], ctx.gradients
        weight = None if gradients.weight is None else (gradients.weight * scale).to(ctx.dtype)
        return gradients.hidden[: ctx.rows] * scale, weight, None, None, None, None


class _Gradients:
    """Where the gradients of the sum gather."""

    def __init__(self, hidden: Tensor, weight: Tensor, *, trained: bool) -> None:
        """`trained`: whether the weight has a gradient."""
        self.hidden = torch.empty_like(hidden)  # (N, D)
        # (V, D); a sum over chunks, for which bfloat16 is too coarse
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.weight = torch.zeros_like(weight, dtype=wide) if trained else None


def _run(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    real: int,
    smoothing: float,
    chunk_rows: int,
    gradients: _Gradients | None,
) -> tuple[Tensor, Tensor]:
    """Both losses, chunk by chunk, every sum at least in float32; fills `gradients` where given.

    Rows from `real` on are zeros: they add nothing to the gradient of the weight, and are left out of the losses.
    """
    rows, vocabulary, dtype = len(hidden), len(weight), weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    nll = torch.empty(rows, dtype=wide, device=hidden.device)
    above_mean = torch.empty_like(nll)  # the right piece's logit minus the mean of all
    mean_weight = (
        weight.sum(0, dtype=wide) / vocabulary
    )  # (D,); its product with a row is the mean of that row's logits
    buffer = weight.new_empty(min(chunk_rows, rows), vocabulary)
    for first in range(0, rows, chunk_rows):
        chunk = slice(first, first + chunk_rows)
        states, gold = hidden[chunk].to(dtype), target[chunk].unsqueeze(1)
        logits = torch.mm(states, weight.t(), out=buffer[: len(states)])
        gold_logit, peak = logits.gather(1, gold).squeeze(1).to(wide), logits.amax(1).to(wide)
        # in the logits' place and type, which round no more than they are rounded already; sums inside are in float32
        error = torch.softmax(logits, 1, out=logits)
        # the largest probability is 1 over the sum of exp(logit - peak), whose logarithm is what is missing
        torch.sub(peak - error.amax(1).to(wide).log(), gold_logit, out=nll[chunk])
        torch.sub(gold_logit, states.to(wide) @ mean_weight, out=above_mean[chunk])
        if gradients is not None:
            if error.device.type == "cpu":  # where scatter_ in bfloat16 takes fifty times as long
                places = (torch.arange(len(states)), gold.squeeze(1))
                error.index_put_(places, error.new_full((), smoothing - 1.0), accumulate=True)
            else:  # where index_put_ with accumulate sorts
                error.scatter_(1, gold, error.gather(1, gold).sub_(1.0 - smoothing))
            gradients.hidden[chunk] = (error @ weight).to(wide).sub_(mean_weight, alpha=smoothing)
            if gradients.weight is not None:
                _add_product(gradients.weight, error.t(), states)
    if gradients is not None and gradients.weight is not None:
        gradients.weight -= hidden.sum(0, dtype=wide) * (smoothing / vocabulary)
    nll = nll[:real]
    return nll.sum().add_(above_mean[:real].sum(), alpha=smoothing), nll


def padded(x: Tensor, step: int) -> Tensor:
    """x (N, ...) with zeros behind it, up to a multiple of `step` rows; x itself where none are missing."""
    missing = -len(x) % step
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass over `total` where it has the factors' type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


class Baseline:
    """What sampled choices are compared with: the moving mean of the rewards so far (Williams, 1992, REINFORCE).

    The reward of a segment is minus its mean nll per token; its term of the loss weighs as many tokens as it has, so
    that the gradient is that of the token-weighted nll with respect to the choices.
    """

    DECAY = 0.99
    """Share of the moving mean that an update leaves."""

    def __init__(self, device: torch.device, sums: tuple[float, float] = (0.0, 0.0)) -> None:
        """`sums`: what `save` gave."""
        self._sums = torch.tensor(sums, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)

    def loss(self, log_prob: Tensor, nll: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over segments of -(reward - baseline) * log_prob * tokens, and the rewards (B,).

        log_prob (B,) of what was sampled; nll (N,) and segment (N,) of each target token.
        """
        tokens = torch.zeros_like(log_prob).index_add(0, segment, torch.ones_like(nll, dtype=log_prob.dtype))
        summed = torch.zeros_like(log_prob).index_add(0, segment, nll.to(log_prob.dtype))
        reward = -summed / tokens.clamp(min=1.0)
        advantage = (reward - self._mean(reward)).detach()
        return -(advantage * tokens * log_prob).sum(), reward.detach()

    def follow(self, reward_sum: Tensor, segments: Tensor) -> None:
        """Move towards the mean reward of an update, all its processes together."""
        mean = reward_sum / segments.clamp(min=1.0)
        self._sums.mul_(self.DECAY).add_(torch.stack([mean, torch.ones_like(mean)]), alpha=1.0 - self.DECAY)

    def save(self) -> tuple[float, float]:
        """The weighted sum of rewards and the sum of their weights."""
        reward, weight = self._sums.tolist()
        return reward, weight

    def _mean(self, reward: Tensor) -> Tensor:
        """The moving mean; before there is one, the mean of what is compared with it."""
        total, weight = self._sums
        return torch.where(weight > 0, total / weight.clamp(min=1e-12), reward.mean())
