"""One update: forward and backward passes over its batches, the sum over processes, the optimiser's step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtkit.data.batches import Batch, blank_batch
from mtkit.errors import RunError
from mtkit.memory import GIVES_OUT, available_bytes, in_words, is_oom
from mtkit.model.adaptation import frozen_state, trained_state
from mtkit.model.build import SMALLER
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.storage.weights import load_weights
from mtkit.training.data_loader import Inputs, Work
from mtkit.training.gradient_reduction import FlatSum, SplitModel, gathered, gradient_sum, split_like
from mtkit.training.loss import Baseline, TokenLoss, batch_loss, batch_loss_twice, twice
from mtkit.training.metrics import Say
from mtkit.training.optimizer import MovingAverage, apply, build_optimizer, optimizer_tensors, restore_optimizer
from mtkit.training.precision import LowWeights, Precision
from mtkit.training.progress import Divergence, Progress
from mtkit.training.world import World

LOSS, NLL, EXTRA, REWARD, SEGMENTS, DIVERGENCE = range(6)
"""Places in the totals of an update: sums over target tokens of the smoothed loss with R-Drop's term, of the nll and of
what attentions add; of the rewards and the number of segments where attentions sample; of R-Drop's divergence."""


class Updater:
    """Applies updates to a model; everything it measures stays on the device until it is read."""

    def __init__(
        self,
        model: Network,
        recipe: Recipe,
        world: World,
        precision: Precision,
        say: Say = lambda line: None,
    ) -> None:
        """`say` takes a line for the user where memory turns out to be short.

        Raises: RunError where the model is to be split, and cannot be.
        """
        self.model = model
        self.world = world
        self.precision = precision
        self._split: SplitModel | None = None
        if recipe.training.shard and world.size > 1:
            if precision.scaler is not None:
                raise RunError("training.shard cannot scale losses as float16 needs it; set --precision bfloat16")
            self._split = SplitModel(model, world, recipe.training.sum_gradients_in)
        self._sum = self._split or gradient_sum(model, world, recipe.training.sum_gradients_in)
        self.optimizer = build_optimizer(model, recipe.training)
        self.low = LowWeights(model)
        self.average: MovingAverage | None = None
        self.baseline = Baseline(world.device)
        self.divergence = Divergence(len(model.output_weight), world.device, Progress())
        self.room: int | None = None
        """The size of batch (`Batch.size`) that the memory is thought to hold, once it was too small for one."""
        self._say = say
        self._recipe, self._settings = recipe, recipe.training
        self._sums = torch.zeros(8, device=world.device)  # what `read` gives
        self._failed = torch.zeros((), dtype=torch.int64, device=world.device)
        self._check_memory()
        if self._settings.ema > 0:
            self.average = MovingAverage(self.model, self._settings.ema)

    def run(self, work: Work, number: int, *, rate: float, total_updates: int) -> None:
        """Update `number` (1, 2, ...) at this learning rate; not applied where loss or gradient are not finite."""
        totals = self._gradients(work.batches, work.tokens, number, summed=True)
        # other processes wait in the last backward pass and here alone, so that one may take batches in parts
        self._sum.finish(totals)
        norm, applied = apply(
            self.optimizer,
            self.precision,
            rate=rate,
            clip_norm=self._settings.clip_norm,
            finite=totals.isfinite().all(),
        )
        self._failed = torch.where((self._failed == 0) & ~applied, number, self._failed)
        made = norm.isfinite()
        self._sums += torch.cat([totals, torch.stack([norm.where(made, 0.0), made])])
        self.baseline.follow(totals[REWARD], totals[SEGMENTS])
        self.divergence.follow(totals[NLL] / work.tokens, number)
        self.model.after_update(number, total_updates)
        if self.average is not None:
            self.average.follow(number)

    def rehearse(self, batches: Sequence[Batch]) -> None:
        """Try what takes the most memory, before the first update: nothing is changed by it but `room`.

        Raises: RunError where a single segment does not fit.
        """
        if self._split is not None:  # passes are steps of all processes together
            return
        before = self._buffers()
        trained = [] if self.optimizer.state else [each for each in self.model.parameters() if each.requires_grad]
        moments = [torch.empty_like(each) for each in trained for _ in range(2)]  # the optimiser's, still to come
        device = self.world.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for batch in batches:
                self._gradients([batch], batch.target_tokens, 0, summed=False)
        del moments
        self.optimizer.zero_grad(set_to_none=True)
        self._put_back(before)

    def failed(self) -> int | None:
        """The first update whose loss or gradient was not finite, or None. Waits for the device."""
        return int(self._failed) or None

    def read(self) -> list[float]:
        """The six totals, the gradient norms and the updates made, summed since the last reading. Waits.

        A norm that is not finite does not count, nor does its update: float16 skips it.
        """
        sums: list[float] = self._sums.tolist()
        self._sums.zero_()
        return sums

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """All weights that are trained, and moments, by file of the checkpoint; whole ones, on the first process.

        All processes must call it: each may have a part of them.
        """

        files = {
            "model": self._whole(trained_state(self.model)),
            "optimizer": self._whole(optimizer_tensors(self.model, self.optimizer)),
        }
        if self.average is not None:
            with self.average.in_place():
                files["ema"] = self._whole(trained_state(self.model))
        return files

    def frozen(self) -> Mapping[str, Tensor]:
        """All weights that are not trained, as `tensors` gives the others."""
        return self._whole(frozen_state(self.model))

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Inside, the model computes with the weights that are validated: averaged ones where there are any."""
        with (
            self.average.in_place() if self.average else nullcontext(),
            self._split.whole() if self._split else nullcontext(),
        ):
            yield

    def load(self, weights: Mapping[str, Tensor], origin: Path) -> None:
        """Put whole weights into the model. Raises: RunError where they belong to another model."""
        own = self.model.state_dict()
        load_weights(
            self.model,
            {name: split_like(value, own[name]) if name in own else value for name, value in weights.items()},
            origin,
        )

    def noted(self, progress: Progress) -> Progress:
        """The place in training, with the small numbers that are kept here."""
        scaler = self.precision.scaler
        progress = self.divergence.noted(progress)
        return replace(progress, baseline=self.baseline.save(), scaler=scaler.state_dict() if scaler else None)

    def restore(self, progress: Progress, tensors: Mapping[str, Mapping[str, Tensor]], origin: Path) -> None:
        """Restore what `tensors` and `noted` returned, the weights that are not trained among those of "model".

        Raises: RunError where it belongs to another model.
        """
        self.load(tensors["model"], origin)
        restore_optimizer(self.model, self.optimizer, tensors["optimizer"], origin)
        if self.average is not None:
            with self.average.in_place():
                self.load({**frozen_state(self.model), **tensors["ema"]}, origin)
        self.baseline = Baseline(self.world.device, progress.baseline)
        self.divergence = Divergence(len(self.model.output_weight), self.world.device, progress)
        if self.precision.scaler is not None and progress.scaler is not None:
            self.precision.scaler.load_state_dict(progress.scaler)

    def _whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors if self._split is None else gathered(tensors, kept=self.world.first)

    def _gradients(self, batches: Sequence[Batch], tokens: int, number: int, *, summed: bool) -> Tensor:
        """The gradients and totals of this process's batches, with every batch in as many parts as memory asks for.

        The sum over processes begins in the last backward pass where `summed`.

        Where memory gives out, in whatever pass, all begins anew with that batch's halves: losses are sums over the
        update's tokens, so the gradient is the same (but for dropout, which the parts draw for themselves, and losses
        of attentions over the source, whose parts weigh as much as their target tokens).
        """
        before = self._buffers()
        if self._lowers:
            self.low.refresh()
        while True:
            seed_generators(self._recipe.seed, number, self.world.rank)
            self.optimizer.zero_grad(set_to_none=True)
            totals = torch.zeros(6, device=self.world.device)
            refused = None
            for batch, last in _with_last(self._parts(batches)):
                if not self._fits(batch, tokens, totals, last=last and summed):
                    refused = batch
                    break
            if refused is None:
                if not batches:
                    self._take_part()
                return totals
            self.optimizer.zero_grad(set_to_none=True)
            self._make_room(refused)
            self._put_back(before)

    def _parts(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """The batches, halved until there is room for each; a single segment is not halved."""
        for batch in batches:
            if self.room is not None and batch.size > self.room and len(batch.source) > 1:
                yield from self._parts(batch.halves())
            else:
                yield batch

    def _fits(self, batch: Batch, tokens: int, totals: Tensor, *, last: bool) -> bool:
        """Add a batch's gradients and totals; False where the memory does not hold it."""
        try:
            with self.low.in_place() if self._lowers else nullcontext():
                self._accumulate(Inputs.of(batch, self.world.device), tokens, totals, last=last)
        except GIVES_OUT as error:
            if not is_oom(error) or self._split is not None:
                raise
            return False
        return True

    def _take_part(self) -> None:
        """Sum with the others in an update that leaves this process no rows."""
        if self._split is None:
            self._sum.backward(None, last=True)
            return
        before, nothing = self._buffers(), torch.zeros(6, device=self.world.device)
        # layers gather and send in passes alone: this one's tokens weigh nothing, of infinitely many
        batch = blank_batch(several_directions=len(self._recipe.data.directions) > 1)
        self._accumulate(Inputs.of(batch, self.world.device), math.inf, nothing, last=True)
        self._put_back(before)

    def _make_room(self, refused: Batch) -> None:
        """Let batches be as small as half of this one. Raises: RunError where it is a single segment."""
        if len(refused.source) == 1:
            raise RunError(
                f"the memory of {self.world.device} does not hold a single segment of {refused.source.shape[1]} source "
                f"and {refused.target_in.shape[1]} target pieces (line {refused.lines[0]} of the training text); "
                "lower model.max_length, or the size of the model, under another --name"
            )
        self._say(
            f"the memory of {self.world.device} does not hold a batch of {len(refused.source)} segments and "
            f"{refused.size:,} pieces per side; such batches are computed in halves, to the same gradient"
        )
        self.room = max(half.size for half in refused.halves())
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # what is cached in the sizes of the larger batch

    def _check_memory(self) -> None:
        """Raises: RunError on a CPU whose memory does not hold gradients, moments and averages of the weights."""
        if self.world.device.type != "cpu" or self._split is not None:
            return
        weights = sum(each.nbytes for each in self.model.parameters() if each.requires_grad)
        needed = weights * (4 if self._settings.ema else 3)
        if needed > (available := available_bytes()):
            raise RunError(
                f"gradients and optimiser state of the model's weights would take {in_words(needed)} of memory, and "
                f"{in_words(available)} are available here: {SMALLER}"
            )

    @property
    def _lowers(self) -> bool:
        # gradients that overlap their sum over processes are sent in the weights' own type
        return self.precision.lowers_weights and isinstance(self._sum, FlatSum)

    def _buffers(self) -> list[Tensor]:
        """What forward passes may move, as statistics that attentions gather."""
        return [buffer.clone() for buffer in self.model.buffers()]

    def _put_back(self, buffers: Sequence[Tensor]) -> None:
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _accumulate(self, inputs: Inputs, tokens: float, totals: Tensor, *, last: bool) -> None:
        """Add a batch's gradients, each of its tokens weighing one of the update's `tokens`, and its `totals`."""
        smoothing, alpha = self._settings.label_smoothing, self._settings.r_drop
        if alpha:
            inputs = twice(inputs)
            pair, output = batch_loss_twice(self.model, inputs, self.precision, smoothing=smoothing, alpha=alpha)
            totals[DIVERGENCE] += pair.divergence
            loss: TokenLoss = pair
        else:
            loss, output = batch_loss(self.model, inputs, self.precision, smoothing=smoothing)
        passes = 2 if alpha else 1  # of which everything is the mean
        objective = loss.smoothed
        measured = [loss.smoothed.detach(), loss.nll.sum() / passes]
        if output.losses:
            # means per token: a batch's weighs as much as the batch has tokens
            extra = torch.stack([each.float() for each in output.losses.values()]).sum() * loss.tokens
            objective = objective + extra
            measured.append(extra.detach())
        totals[: len(measured)] += torch.stack(measured)
        if output.log_prob is not None:
            sampled, reward = self.baseline.loss(output.log_prob.float(), loss.nll, inputs.places // inputs.width)
            objective = objective + sampled / passes
            totals[REWARD] += reward.sum()
            totals[SEGMENTS] += len(reward)
        self._sum.backward(self.precision.scaled(objective / tokens), last=last)


def _with_last(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it is the last one; the next is asked for before."""
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch, following is None
        batch = following


def seed_generators(seed: int, update: int, rank: int) -> None:
    """Make all randomness of an update a function of seed, update and process.

    Nothing before it, a validation or an interruption, can then change what dropout draws.
    """
    torch.manual_seed(int(np.random.SeedSequence((seed, update, rank)).generate_state(1, np.uint64)[0]))
