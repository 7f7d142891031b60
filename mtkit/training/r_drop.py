"""R-Drop: two passes with different dropout, drawn towards each other's predictions.

Source: Wu et al., "R-Drop: Regularized Dropout for Neural Networks", NeurIPS 2021, https://arxiv.org/abs/2106.14448,
equations 2 to 4. With P and Q the predictions of the two passes, a token's loss is half of the paper's

    nll(P) + nll(Q) + alpha/2 * (KL(P || Q) + KL(Q || P)),

so that it stays a mean over passes, and gradient clipping means what it means without R-Drop. Each nll is
label-smoothed as in `mtkit.training.loss`; the divergences are of the predictions as they are. What attentions add to
the loss is the mean of both passes too. What they sample in a pass is rewarded by that pass's nll alone.

The batch is given to the model twice, in one pass of twice the rows. The logits of both copies of a chunk of tokens are
made together and both gradients with them, as in `mtkit.training.loss`: nothing of the size tokens x V is kept. With d
the difference of the two rows of logits, the two divergences sum to sum_v (p_v - q_v) d_v, and the gradient of that
with respect to the logits of P is p * (d - sum_v p_v d_v) + p - q.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.model.network import Network, Output
from mtkit.training.feed import Inputs
from mtkit.training.loss import CHUNK_ELEMENTS, STEP, TokenLoss, padded, predicting
from mtkit.training.optimization.optimizer import Precision


@dataclass(frozen=True)
class TwiceLoss(TokenLoss):
    """Summed and per-token loss of N target tokens, each predicted twice.

    `smoothed` is the whole objective: the mean of both passes and the weighted divergence. `nll` is (2N,), the first
    pass's tokens before the second's.
    """

    divergence: Tensor
    """Scalar: the sum over tokens of half of KL(P || Q) + KL(Q || P), in nats, without a gradient."""

    @property
    def tokens(self) -> int:
        """N: each token counts once."""
        return len(self.nll) // 2


def twice(inputs: Inputs) -> Inputs:
    """The batch followed by itself: 2B segments and 2N places; `target` (2N,)."""
    positions = inputs.target_in.numel()

    def double(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.cat([tensor, tensor])

    return replace(
        inputs,
        source=torch.cat([inputs.source, inputs.source]),
        source_valid=double(inputs.source_valid),
        source_lengths=double(inputs.source_lengths),
        target_in=torch.cat([inputs.target_in, inputs.target_in]),
        target_valid=double(inputs.target_valid),
        places=torch.cat([inputs.places, inputs.places + positions]),
        target=torch.cat([inputs.target, inputs.target]),
        task=double(inputs.task),
    )


def batch_loss_twice(
    model: Network, inputs: Inputs, precision: Precision, *, smoothing: float, alpha: float
) -> tuple[TwiceLoss, Output]:
    """The loss of a batch that `twice` gave, in one forward pass, and the pass's output."""
    with precision.autocast():
        hidden, output = predicting(model, inputs)
        loss = token_loss_twice(*model.factors(hidden), inputs.target, smoothing=smoothing, alpha=alpha)
    return loss, output


def token_loss_twice(
    hidden: Tensor, weight: Tensor, target: Tensor, *, smoothing: float, alpha: float, chunk_rows: int | None = None
) -> TwiceLoss:
    """The loss of predicting target (2N,), the same N tokens twice, from hidden (2N, D); weight (V, D).

    Under autocast the products run in autocast's type and all sums in float32; otherwise everything runs in the type of
    `weight`. `chunk_rows`: tokens whose logits, two rows each, are held at a time.
    """
    if chunk_rows is None:
        chunk_rows = max(STEP, CHUNK_ELEMENTS.get(hidden.device.type, 4 << 20) // (2 * weight.shape[0]) // STEP * STEP)
    return TwiceLoss(*_ChunkedRDrop.apply(hidden, weight, target, smoothing, alpha, chunk_rows))  # type: ignore[no-untyped-call]


class _ChunkedRDrop(torch.autograd.Function):
    """The objective, (2N,) plain losses and the divergence; the objective's gradients are ready when forward ends."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, smoothing: float, alpha: float, chunk_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            trained = ctx.needs_input_grad[1]
            run = _Run(hidden, weight.to(dtype), target, smoothing, alpha, min(STEP, chunk_rows), trained=trained)
            for first in range(0, run.rows, chunk_rows):
                run.add(slice(first, first + chunk_rows))
            objective, nll, divergence = run.sums()
            ctx.gradients = run.gradients()
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(nll, divergence)
        return objective, nll, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.gradients
        of_weight = None if weight is None else (weight * upstream[0]).to(ctx.dtype)
        return hidden * upstream[0], of_weight, None, None, None, None


class _Run:
    """Losses and gradients, chunk by chunk; all sums at least in float32, of both passes, halved at the end.

    Rows come in multiples of `step` (`mtkit.training.loss.STEP`): those behind the N real ones are zeros.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        smoothing: float,
        alpha: float,
        step: int,
        *,
        trained: bool,
    ) -> None:
        """`trained`: whether the weight has a gradient."""
        self._real, wide = len(hidden) // 2, torch.promote_types(weight.dtype, torch.float32)
        self._hidden = torch.stack([padded(each, step) for each in hidden.detach().chunk(2)])
        self._weight, self._target = weight, padded(target[: self._real], step)
        self.rows = rows = len(self._target)
        self._smoothing, self._alpha, self._wide = smoothing, alpha, wide
        self._nll = torch.empty(2, rows, dtype=wide, device=hidden.device)
        self._above_mean = torch.empty_like(self._nll)  # the right piece's logit minus the mean of all
        self._both_ways = self._nll.new_empty(rows)  # the sum of the two divergences
        # (D,); its product with a row is the mean of that row's logits
        self._mean_weight = weight.sum(0, dtype=wide) / len(weight)
        self._hidden_gradient = torch.empty_like(self._hidden)
        self._weight_gradient = torch.zeros_like(weight, dtype=wide) if trained else None

    def add(self, chunk: slice) -> None:
        """The chunk's C tokens, from 2C rows of logits."""
        states = self._hidden[:, chunk].flatten(0, 1).to(self._weight.dtype)
        gold = self._target[chunk].repeat(2).unsqueeze(1)
        logits = states @ self._weight.t()  # (2C, V)
        gold_logit, peak = logits.gather(1, gold).squeeze(1).to(self._wide), logits.amax(1).to(self._wide)
        here = torch.softmax(logits, 1, dtype=self._wide)
        # the largest probability is 1 over the sum of exp(logit - peak), whose logarithm is what is missing
        self._nll[:, chunk] = (peak - here.amax(1).log() - gold_logit).view(2, -1)
        self._above_mean[:, chunk] = (gold_logit - states.to(self._wide) @ self._mean_weight).view(2, -1)
        one, other = logits.chunk(2)
        self._both_ways[chunk] = _add_divergence(here, one.to(self._wide) - other, self._alpha / 2)
        error = here.scatter_add_(1, gold, here.new_full(gold.shape, self._smoothing - 1.0)).to(self._weight.dtype)
        gradient = (error @ self._weight).to(self._wide).sub_(self._mean_weight, alpha=self._smoothing)
        self._hidden_gradient[:, chunk] = gradient.view(2, -1, gradient.shape[1])
        if self._weight_gradient is not None:
            self._weight_gradient += error.t() @ states

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """The objective, the plain losses (2N,) and the divergence, once every chunk is in."""
        nll, above_mean = self._nll[:, : self._real], self._above_mean[:, : self._real]
        divergence = self._both_ways[: self._real].sum() / 2
        smoothed = nll.sum().add_(above_mean.sum(), alpha=self._smoothing)
        return smoothed / 2 + self._alpha / 2 * divergence, nll.flatten(), divergence

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Those of the objective for hidden (2N, D) and weight (V, D)."""
        hidden = self._hidden_gradient[:, : self._real].flatten(0, 1).div_(2)
        if self._weight_gradient is None:
            return hidden, None
        states = self._hidden.sum((0, 1), dtype=self._wide)
        weight = self._weight_gradient.sub_(states, alpha=self._smoothing / len(self._weight))
        return hidden, weight.div_(2)


def _add_divergence(both: Tensor, difference: Tensor, weight: float) -> Tensor:
    """KL(P || Q) + KL(Q || P) of each row (C,); `weight` times its gradient for the logits is added to `both`.

    both (2C, V) holds P and below it Q; difference (C, V), the logits of P minus those of Q. With the
    gradient written out, p becomes p * (1 + weight + weight * (d - sum_v p_v d_v)) - weight * q, and q the same with d
    negated.
    """
    p, q = both.chunk(2)
    p_mean, q_mean = (torch.linalg.vecdot(each, difference).unsqueeze(1) for each in (p, q))  # (C, 1)
    q_before = q.clone()
    q.mul_(torch.add(1.0 + weight + weight * q_mean, difference, alpha=-weight)).sub_(p, alpha=weight)
    p.mul_(torch.add(1.0 + weight - weight * p_mean, difference, alpha=weight)).sub_(q_before, alpha=weight)
    return (p_mean - q_mean).squeeze(1)
