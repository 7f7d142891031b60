"""One update: forward and backward passes over its batches, the sum over processes, the optimiser's step."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtkit.model.transformer import Transformer
from mtkit.recipe import Recipe
from mtkit.training.averaging import MovingAverage
from mtkit.training.checkpoint import Progress, load_weights
from mtkit.training.distributed import World
from mtkit.training.feed import Inputs, Work, to_device
from mtkit.training.loss import Baseline, token_loss
from mtkit.training.optimizer import Precision, apply, build_optimizer, optimizer_tensors, restore_optimizer

LOSS, NLL, EXTRA, REWARD, SEGMENTS = range(5)
"""Places in the totals of an update: sums over target tokens of the smoothed loss, of the nll and of what attentions
add; of the rewards and the number of segments where attentions sample."""


class Updater:
    """Applies updates to a model; everything it measures stays on the device until it is read."""

    def __init__(self, model: Transformer, recipe: Recipe, world: World, precision: Precision) -> None:
        self.model = model
        self.world = world
        self.precision = precision
        self.optimizer = build_optimizer(model, recipe.training)
        self.average: MovingAverage | None = None
        self.baseline = Baseline(world.device)
        self._settings = recipe.training
        self._seed = recipe.seed
        self._sums = torch.zeros(6, device=world.device)  # the five totals, and the gradient norms
        self._failed = torch.zeros((), dtype=torch.int64, device=world.device)
        self.begin_average()

    def begin_average(self) -> None:
        """Let the moving average, where one is wanted, begin at the weights as they are."""
        if self._settings.ema > 0:
            self.average = MovingAverage(self.model, self._settings.ema)

    def run(self, work: Work, number: int, *, rate: float, total_updates: int) -> None:
        """Update `number` (1, 2, ...) at this learning rate; not applied where loss or gradient are not finite."""
        seed_generators(self._seed, number, self.world.rank)
        self.optimizer.zero_grad(set_to_none=True)
        totals = torch.zeros(5, device=self.world.device)
        for batch in work.batches:
            self._accumulate(to_device(batch, self.world.device), work.tokens, totals)
        self.world.sum_gradients(self.model, totals)
        norm, applied = apply(
            self.optimizer,
            self.precision,
            rate=rate,
            clip_norm=self._settings.clip_norm,
            finite=totals.isfinite().all(),
        )
        self._failed = torch.where((self._failed == 0) & ~applied, number, self._failed)
        self._sums += torch.cat([totals, norm.reshape(1)])
        self.baseline.follow(totals[REWARD], totals[SEGMENTS])
        if self.average is not None:
            self.average.follow(number)
        self.model.after_update(number, total_updates)

    def failed(self) -> int | None:
        """The first update whose loss or gradient was not finite, or None. Waits for the device."""
        return int(self._failed) or None

    def read(self) -> list[float]:
        """The five totals and the gradient norms, summed over the updates since the last reading. Waits."""
        sums: list[float] = self._sums.tolist()
        self._sums.zero_()
        return sums

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """All weights and moments, by the checkpoint's files."""
        files: dict[str, Mapping[str, Tensor]] = {
            "model": self.model.state_dict(),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
        }
        if self.average is not None:
            with self.average.in_place():
                files["ema"] = self.model.state_dict()
        return files

    def noted(self, progress: Progress) -> Progress:
        """The place in training, with the small numbers that are kept here."""
        scaler = self.precision.scaler
        return replace(progress, baseline=self.baseline.save(), scaler=scaler.state_dict() if scaler else None)

    def restore(self, progress: Progress, tensors: Mapping[str, Mapping[str, Tensor]], origin: Path) -> None:
        """Put back what `tensors` and `noted` gave. Raises: RunError where it belongs to another model."""
        load_weights(self.model, tensors["model"], origin)
        restore_optimizer(self.model, self.optimizer, tensors["optimizer"])
        if self.average is not None:
            with self.average.in_place():
                load_weights(self.model, tensors["ema"], origin)
        self.baseline = Baseline(self.world.device, progress.baseline)
        if self.precision.scaler is not None and progress.scaler is not None:
            self.precision.scaler.load_state_dict(progress.scaler)

    def _accumulate(self, inputs: Inputs, tokens: int, totals: Tensor) -> None:
        """Add a batch's gradients, each of its tokens weighing one of the update's `tokens`, and its `totals`."""
        model = self.model
        with self.precision.autocast():
            output = model(
                inputs.source,
                inputs.target_in,
                source_valid=inputs.source_valid,
                target_valid=inputs.target_valid,
            )
            hidden = output.hidden.flatten(0, 1).index_select(0, inputs.places)
            loss = token_loss(hidden, model.output_weight, inputs.target, smoothing=self._settings.label_smoothing)
        objective = loss.smoothed
        measured = [loss.smoothed.detach(), loss.nll.sum()]
        if output.losses:
            # means per token: a batch's weighs as much as the batch has tokens
            extra = torch.stack([each.float() for each in output.losses.values()]).sum() * loss.tokens
            objective = objective + extra
            measured.append(extra.detach())
        totals[: len(measured)] += torch.stack(measured)
        if output.log_prob is not None:
            sampled, reward = self.baseline.loss(output.log_prob.float(), loss.nll, inputs.places // inputs.width)
            objective = objective + sampled
            totals[REWARD] += reward.sum()
            totals[SEGMENTS] += len(reward)
        self.precision.backward(objective / tokens)


def seed_generators(seed: int, update: int, rank: int) -> None:
    """Make all randomness of an update a function of seed, update and process.

    Nothing before it, a validation or an interruption, can then change what dropout draws.
    """
    torch.manual_seed(int(np.random.SeedSequence((seed, update, rank)).generate_state(1, np.uint64)[0]))
