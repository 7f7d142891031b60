"""Label-smoothed cross-entropy and R-Drop, fused with the output projection and computed in chunks of rows.

The smoothing is the form of Szegedy et al. (2016), as in `torch.nn.functional.cross_entropy`: with l the
log-probabilities over V pieces and y the right one, (1 - e) * -l_y + e/V * sum_v -l_v.

A chunk's logits are computed, used for the loss and for both gradients, and freed before the next chunk's: nothing of
the size tokens x V is kept. The forward pass computes the gradients, so the backward pass needs no second product with
the V-wide matrix, and a training step needs three products, the fewest possible. A chunk's logits are read twice for
the maxima and once for the softmax. The smoothing needs no pass over them: the sum of a row's logits is one product
with the weight's column sum, and its gradient is the same for all rows and all pieces.

R-Drop: Wu et al., "R-Drop: Regularized Dropout for Neural Networks", NeurIPS 2021, https://arxiv.org/abs/2106.14448,
equations 2 to 4. With P and Q the predictions of two passes with different dropout, a token's loss is half of the
paper's

    nll(P) + nll(Q) + alpha/2 * (KL(P || Q) + KL(Q || P)),

so that it stays a mean over passes, and gradient clipping means what it means without R-Drop. Each nll is
label-smoothed; the divergences are not. With d the difference of the two rows of logits, the two divergences sum to
sum_v (p_v - q_v) d_v, and the gradient of that with respect to the logits of P is p * (d - sum_v p_v d_v) + p - q.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtkit.attention.kernels.cpu.training_products import product
from mtkit.device import runs_kernels
from mtkit.model.gpu_layers import cross_entropy

CHUNK_ELEMENTS = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Logits held at a time: about what the last cache of a CPU holds, and what fills a GPU."""

STEP = 64
"""Rows of logits come in multiples of this; the last ones are zeros that do not count. A CPU library generates code
for every number of rows in a bfloat16 product, which takes longer than the product."""


@dataclass(frozen=True)
class TokenLoss:
    """Loss of N target tokens, in nats."""

    objective: Tensor
    """Scalar with a gradient: the summed smoothed cross-entropy. With R-Drop, the mean over both passes plus
    alpha / 2 times `divergence`."""
    nll: Tensor
    """(N,): the plain negative log-likelihood of each token, without a gradient. With R-Drop (2N,), the first pass's
    tokens before the second's."""
    tokens: int | Tensor
    """N; with `real`, a scalar on the device: the number of real tokens."""
    divergence: Tensor | float = 0.0
    """R-Drop's: the sum over tokens of half of KL(P || Q) + KL(Q || P), without a gradient."""


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    smoothing: float,
    real: Tensor | None = None,
    chunk_rows: int | None = None,
) -> TokenLoss:
    """Return the loss of predicting target (N,) from hidden (N, D) with logits hidden @ weight.T; weight (V, D).

    Rows where `real` (N,) is False do not count; without it all do. Under autocast the products run in autocast's type
    and all sums in float32; otherwise everything runs in the type of `weight`. `chunk_rows`: rows of logits held at a
    time.
    """
    chunk_rows = chunk_rows or _chunk_rows(hidden, len(weight))
    needs_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    smoothed, nll = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, target, real, smoothing, chunk_rows, needs_gradients
    )
    return TokenLoss(smoothed, nll, len(nll) if real is None else real.sum())


def r_drop_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    smoothing: float,
    alpha: float,
    real: Tensor | None = None,
    chunk_rows: int | None = None,
) -> TokenLoss:
    """Return the loss of predicting target (2N,), the same N tokens twice, from hidden (2N, D); weight (V, D).

    Types and `real` (2N,) as in `token_loss`. `chunk_rows`: tokens whose logits, two rows each, are held at a time.
    """
    chunk_rows = chunk_rows or _chunk_rows(hidden, 2 * len(weight))
    objective, nll, divergence = _ChunkedRDrop.apply(hidden, weight, target, real, smoothing, alpha, chunk_rows)  # type: ignore[no-untyped-call]
    return TokenLoss(objective, nll, len(nll) // 2 if real is None else real.sum() // 2, divergence)


def _chunk_rows(hidden: Tensor, elements: int) -> int:
    """Rows of a chunk with so many logits in each."""
    return max(STEP, CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cpu"]) // elements // STEP * STEP)


def _product_type(weight: Tensor) -> torch.dtype:
    """Autocast's type if it is enabled, else the weight's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of the smoothed loss and (N,) plain losses; forward computes both gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        real: Tensor | None,
        smoothing: float,
        chunk_rows: int,
        gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _product_type(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            states, gold = (padded(rows, min(STEP, chunk_rows)) for rows in (zeroed(hidden, real), target))
            # at least in float32: bfloat16 is too coarse for a sum over chunks
            wide = torch.promote_types(weight.dtype, torch.float32)
            trained = gradients and ctx.needs_input_grad[1]
            for_hidden: Any = torch.empty_like(states) if gradients else None
            for_weight = torch.zeros_like(weight, dtype=wide) if trained else None
            factor = weight.to(dtype)
            compute = (
                _cross_entropy_fused
                if gradients and dtype != torch.float16 and runs_kernels(states, factor)
                else _cross_entropy
            )
            smoothed, nll = compute(
                states, factor, gold, len(hidden), real, smoothing, chunk_rows, for_hidden, for_weight
            )
        ctx.save_for_backward(for_hidden, for_weight, real)  # freed as soon as backward has read them
        ctx.dtype, ctx.rows = weight.dtype, len(hidden)
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, real = ctx.saved_tensors
        if weight is not None:
            weight = torch.mul(weight, upstream[0], out=torch.empty_like(weight, dtype=ctx.dtype))
        return zeroed(hidden[: ctx.rows], real) * upstream[0], weight, None, None, None, None, None


def _cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    rows: int,
    real: Tensor | None,
    smoothing: float,
    chunk_rows: int,
    hidden_gradient: Tensor | None,
    weight_gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Both losses, chunk by chunk, all sums at least in float32; fills the gradients (N, D) and (V, D).

    Rows from `rows` on and padding rows are zeros: they add nothing to the weight's gradient, and are left out of the
    losses.
    """
    vocabulary, dtype = len(weight), weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    nll = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    above_mean = torch.empty_like(nll)  # the right piece's logit minus the mean of all
    mean_weight = weight.sum(0, dtype=wide) / vocabulary  # (D,); its product with a row is the mean of the row's logits
    for first in range(0, len(hidden), chunk_rows):
        chunk = slice(first, first + chunk_rows)
        states, gold = hidden[chunk].to(dtype), target[chunk].unsqueeze(1)
        logits = product(states, weight.t())
        gold_logit, peak = logits.gather(1, gold).squeeze(1).to(wide), logits.amax(1).to(wide)
        # in place of the logits, in their type: they are rounded to it already, and the sums inside are in float32
        error = torch.softmax(logits, 1, out=logits)
        # the largest probability is 1 over the sum of exp(logit - peak): its logarithm completes the log-sum-exp
        torch.sub(peak - error.amax(1).to(wide).log(), gold_logit, out=nll[chunk])
        torch.sub(gold_logit, states.to(wide) @ mean_weight, out=above_mean[chunk])
        if hidden_gradient is not None:
            if error.device.type == "cpu":  # scatter_ in bfloat16 takes fifty times as long here
                places = (torch.arange(len(states)), gold.squeeze(1))
                error.index_put_(places, error.new_full((), smoothing - 1.0), accumulate=True)
            else:  # index_put_ with accumulate sorts on a GPU
                error.scatter_(1, gold, error.gather(1, gold).sub_(1.0 - smoothing))
            hidden_gradient[chunk] = product(error, weight).to(wide).sub_(mean_weight, alpha=smoothing)
            if weight_gradient is not None:
                _add_product(weight_gradient, error.t(), states)
        del logits, error  # their memory serves the next chunk
    if weight_gradient is not None:
        weight_gradient -= hidden.sum(0, dtype=wide) * (smoothing / vocabulary)
    nll = zeroed(nll[:rows], real)
    return nll.sum().add_(zeroed(above_mean[:rows], real).sum(), alpha=smoothing), nll


def _cross_entropy_fused(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    rows: int,
    real: Tensor | None,
    smoothing: float,
    chunk_rows: int,
    hidden_gradient: Tensor,
    weight_gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`_cross_entropy` on a GPU, which reads a chunk's logits once for both losses and once for the gradient."""
    losses = torch.empty(2, len(hidden), device=hidden.device)
    buffer = weight.new_empty(min(chunk_rows, len(hidden)), len(weight))
    for first in range(0, len(hidden), chunk_rows):
        chunk = slice(first, first + chunk_rows)
        states = hidden[chunk]
        error = torch.mm(states, weight.t(), out=buffer[: len(states)])
        cross_entropy(error, target[chunk], smoothing, losses[0, chunk], losses[1, chunk])
        torch.mm(error, weight, out=hidden_gradient[chunk])
        if weight_gradient is not None:
            _add_product(weight_gradient, error.t(), states)
    smoothed, nll = (zeroed(part[:rows], real) for part in losses)
    return smoothed.sum(), nll


def padded(x: Tensor, step: int) -> Tensor:
    """x (N, ...) followed by zeros up to a multiple of `step` rows; x itself if it is one."""
    missing = -len(x) % step
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def zeroed(x: Tensor, real: Tensor | None) -> Tensor:
    """x (N, ...) with zeros in the rows where real (N,) is False; x itself without `real`."""
    return x if real is None else torch.where(real.view(-1, *[1] * (x.dim() - 1)), x, 0.0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass over `total` if it has the factors' type, or on a GPU of Nvidia."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif runs_kernels(left) and torch.version.cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


class _ChunkedRDrop(torch.autograd.Function):
    """The objective, (2N,) plain losses and the divergence; forward computes the objective's gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        real: Tensor | None,
        smoothing: float,
        alpha: float,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = _product_type(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            trained = ctx.needs_input_grad[1]
            step = min(STEP, chunk_rows)
            factor = weight.to(dtype)
            sums = _RDropSums(zeroed(hidden, real), factor, target, real, smoothing, alpha, step, trained=trained)
            for first in range(0, sums.rows, chunk_rows):
                sums.add(slice(first, first + chunk_rows))
            objective, nll, divergence = sums.losses()
            ctx.save_for_backward(*sums.gradients(), real)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(nll, divergence)
        return objective, nll, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, real = ctx.saved_tensors
        weight_gradient = None if weight is None else (weight * upstream[0]).to(ctx.dtype)
        return zeroed(hidden, real) * upstream[0], weight_gradient, None, None, None, None, None


class _RDropSums:
    """R-Drop's losses and gradients, chunk by chunk: sums over both passes, at least in float32, halved at the end.

    Rows are padded with zeros to a multiple of `step`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        real: Tensor | None,
        smoothing: float,
        alpha: float,
        step: int,
        *,
        trained: bool,
    ) -> None:
        """`trained`: whether the weight has a gradient."""
        self._tokens, self._real, wide = len(hidden) // 2, real, torch.promote_types(weight.dtype, torch.float32)
        self._hidden = torch.stack([padded(rows, step) for rows in hidden.detach().chunk(2)])
        self._weight, self._target = weight, padded(target[: self._tokens], step)
        self.rows = rows = len(self._target)
        self._smoothing, self._alpha, self._wide = smoothing, alpha, wide
        self._nll = torch.empty(2, rows, dtype=wide, device=hidden.device)
        self._above_mean = torch.empty_like(self._nll)  # the right piece's logit minus the mean of all
        self._divergences = self._nll.new_empty(rows)  # KL(P || Q) + KL(Q || P)
        # (D,); its product with a row is the mean of that row's logits
        self._mean_weight = weight.sum(0, dtype=wide) / len(weight)
        self._hidden_gradient = torch.empty_like(self._hidden)
        self._weight_gradient = torch.zeros_like(weight, dtype=wide) if trained else None

    def add(self, chunk: slice) -> None:
        """Add the chunk's C tokens, with 2C rows of logits."""
        states = self._hidden[:, chunk].flatten(0, 1).to(self._weight.dtype)
        gold = self._target[chunk].repeat(2).unsqueeze(1)
        logits = product(states, self._weight.t())  # (2C, V)
        gold_logit, peak = logits.gather(1, gold).squeeze(1).to(self._wide), logits.amax(1).to(self._wide)
        probabilities = torch.softmax(logits, 1, dtype=self._wide)
        # the largest probability is 1 over the sum of exp(logit - peak): its logarithm completes the log-sum-exp
        self._nll[:, chunk] = (peak - probabilities.amax(1).log() - gold_logit).view(2, -1)
        self._above_mean[:, chunk] = (gold_logit - states.to(self._wide) @ self._mean_weight).view(2, -1)
        first, second = logits.chunk(2)
        self._divergences[chunk] = _add_divergence(probabilities, first.to(self._wide) - second, self._alpha / 2)
        error = probabilities.scatter_add_(1, gold, probabilities.new_full(gold.shape, self._smoothing - 1.0))
        error = error.to(self._weight.dtype)
        gradient = product(error, self._weight).to(self._wide).sub_(self._mean_weight, alpha=self._smoothing)
        self._hidden_gradient[:, chunk] = gradient.view(2, -1, gradient.shape[1])
        if self._weight_gradient is not None:
            self._weight_gradient += error.t() @ states

    def losses(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the objective, the plain losses (2N,) and the divergence, once every chunk is added."""
        nll, above_mean = (
            zeroed(rows[:, : self._tokens].flatten(), self._real) for rows in (self._nll, self._above_mean)
        )
        divergence = self._divergences[: self._tokens].sum() / 2  # rows of zeros have none
        smoothed = nll.sum().add_(above_mean.sum(), alpha=self._smoothing)
        return smoothed / 2 + self._alpha / 2 * divergence, nll, divergence

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Return the objective's gradients for hidden (2N, D) and weight (V, D)."""
        hidden = self._hidden_gradient[:, : self._tokens].flatten(0, 1).div_(2)
        if self._weight_gradient is None:
            return hidden, None
        states = self._hidden.sum((0, 1), dtype=self._wide)
        weight = self._weight_gradient.sub_(states, alpha=self._smoothing / len(self._weight))
        return hidden, weight.div_(2)


def _add_divergence(both: Tensor, difference: Tensor, weight: float) -> Tensor:
    """KL(P || Q) + KL(Q || P) of each row (C,); `weight` times its gradient for the logits is added to `both`.

    both (2C, V) holds P and below it Q; difference (C, V) is P's logits minus Q's. With the gradient written
    out, p becomes p * (1 + weight + weight * (d - sum_v p_v d_v)) - weight * q, and q the same with d negated.
    """
    p, q = both.chunk(2)
    p_mean, q_mean = (torch.linalg.vecdot(rows, difference).unsqueeze(1) for rows in (p, q))  # (C, 1)
    old_q = q.clone()
    q.mul_(torch.add(1.0 + weight + weight * q_mean, difference, alpha=-weight)).sub_(p, alpha=weight)
    p.mul_(torch.add(1.0 + weight - weight * p_mean, difference, alpha=weight)).sub_(old_q, alpha=weight)
    return (p_mean - q_mean).squeeze(1)
