"""Label-smoothed cross-entropy, fused with the output projection and computed a chunk of rows at a time.

The smoothing is the form of Szegedy et al. (2016), which `torch.nn.functional.cross_entropy` has too: with l the
log-probabilities over V pieces and y the right one, (1 - e) * -l_y + e/V * sum_v -l_v.

A chunk's logits are made, used for the loss and for both gradients, and overwritten by the next chunk's, so that
nothing of the size tokens x V is ever kept. The gradients are made in the forward pass: the backward pass then needs no
second product with the V-wide matrix, and three products, the least possible, serve one training step. Over a chunk's
logits go two reads for the maxima and one softmax besides: the smoothing needs none, because the sum of a row's logits
is one product with the weight's column sum, and its gradient is the same for all rows and all pieces.

R-Drop: two passes with different dropout, drawn towards each other's predictions.

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
from mtkit.training.data_loader import Inputs
from mtkit.training.precision import Precision

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
