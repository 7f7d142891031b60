"""The objective of training: the token loss, R-Drop's divergence, the attentions' losses, and sampled choices."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtkit.model.network import Network, Output
from mtkit.recipe import TrainingSettings
from mtkit.training.device_batch import DeviceBatch
from mtkit.training.loss import r_drop_loss, token_loss

LOSS, NLL, EXTRA, REWARD, SEGMENTS, DIVERGENCE = range(6)
"""Indices of an update's totals. Sums over target tokens: the smoothed loss including R-Drop's term, the nll, and the
attentions' losses. If attentions sample: the sum of the rewards, and the number of segments. Last, R-Drop's divergence.
"""


class Objective:
    """The scalar that an update minimises, as a sum over target tokens.

    With R-Drop, the model gets each batch twice, and everything is the mean of the two passes.
    """

    def __init__(self, settings: TrainingSettings, device: torch.device) -> None:
        self.baseline = Baseline(device)
        self._smoothing, self._alpha, self._device = settings.label_smoothing, settings.r_drop, device

    def new_totals(self) -> Tensor:
        """(6,) zeros, one for each index from `LOSS` to `DIVERGENCE`."""
        return torch.zeros(6, device=self._device)

    def prepare(self, batch: DeviceBatch) -> DeviceBatch:
        """Return the batch as the model gets it."""
        return doubled(batch) if self._alpha else batch

    def __call__(self, model: Network, output: Output, batch: DeviceBatch, totals: Tensor) -> Tensor:
        """Return the objective of the model's `output` for a prepared batch; its measurements are added to `totals`."""
        factors, target, real = model.factors(batch.predicting(output.hidden)), batch.target, batch.real
        if self._alpha:
            loss = r_drop_loss(*factors, target, smoothing=self._smoothing, alpha=self._alpha, real=real)
            totals[DIVERGENCE] += loss.divergence
        else:
            loss = token_loss(*factors, target, smoothing=self._smoothing, real=real)
        passes = 2 if self._alpha else 1
        objective = loss.objective
        measured = [loss.objective.detach(), loss.nll.sum() / passes]
        if output.losses:
            # means per token: a batch's weighs as much as the batch has tokens
            extra = torch.stack([value.float() for value in output.losses.values()]).sum() * loss.tokens
            objective = objective + extra
            measured.append(extra.detach())
        totals[: len(measured)] += torch.stack(measured)
        if output.log_prob is not None:
            sampled, reward = self.baseline.loss(output.log_prob.float(), loss.nll, batch.segments, real)
            objective = objective + sampled / passes
            totals[REWARD] += reward.sum()
            totals[SEGMENTS] += len(reward)
        return objective


def doubled(batch: DeviceBatch) -> DeviceBatch:
    """Return the batch followed by itself: 2B segments and 2N places; `target` (2N,)."""
    fields: dict[str, Any] = {name: torch.cat([x, x]) for name, x in vars(batch).items() if isinstance(x, Tensor)}
    if batch.places is not None:
        fields["places"] = torch.cat([batch.places, batch.places + batch.target_in.numel()])
    return replace(batch, **fields)


class Baseline:
    """The moving mean of the rewards so far, which sampled choices are compared with (Williams, 1992, REINFORCE).

    The reward of a segment is minus its mean nll per token; its term of the loss weighs as many tokens as it has, so
    that the gradient is the gradient of the token-weighted nll with respect to the choices.
    """

    DECAY = 0.99
    """Share of the moving mean that an update keeps."""

    def __init__(self, device: torch.device, sums: tuple[float, float] = (0.0, 0.0)) -> None:
        """`sums`: as `save` returned them."""
        self._sums = torch.tensor(sums, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)

    def loss(self, log_prob: Tensor, nll: Tensor, segment: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum over segments of -(reward - baseline) * log_prob * tokens, and the rewards (B,).

        log_prob (B,) of what was sampled; nll (N,) and segment (N,) of each target token; real (N,), None if all are.
        """
        counted = torch.ones_like(nll, dtype=log_prob.dtype) if real is None else real.to(log_prob.dtype)
        tokens = torch.zeros_like(log_prob).index_add(0, segment, counted)
        summed = torch.zeros_like(log_prob).index_add(0, segment, nll.to(log_prob.dtype))
        reward = -summed / tokens.clamp(min=1.0)
        advantage = (reward - self._mean(reward)).detach()
        return -(advantage * tokens * log_prob).sum(), reward.detach()

    def follow(self, reward_sum: Tensor, segments: Tensor) -> None:
        """Move towards the mean reward of an update over all processes."""
        mean = reward_sum / segments.clamp(min=1.0)
        self._sums.mul_(self.DECAY).add_(torch.stack([mean, torch.ones_like(mean)]), alpha=1.0 - self.DECAY)

    def save(self) -> tuple[float, float]:
        """Return the weighted sum of rewards and the sum of their weights."""
        reward, weight = self._sums.tolist()
        return reward, weight

    def _mean(self, reward: Tensor) -> Tensor:
        """Return the moving mean; before the first update, the mean of these rewards."""
        total, weight = self._sums
        return torch.where(weight > 0, total / weight.clamp(min=1e-12), reward.mean())
