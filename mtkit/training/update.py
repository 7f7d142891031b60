"""One update around the training step: seeds, halving of batches that do not fit in memory, averages, measurements."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtkit.attention.kernels.cpu.training_products import float32_products
from mtkit.data.batches import Batch, blank_batch
from mtkit.device import triton_kernels
from mtkit.errors import RunError
from mtkit.memory import OOM_ERRORS, available_bytes, in_words, is_oom
from mtkit.model.adaptation import frozen_state, trained_state
from mtkit.model.build import SMALLER
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.storage.weights import load_weights
from mtkit.terminal import Say, quiet
from mtkit.training.data_loader import UpdateBatches
from mtkit.training.device_batch import DeviceBatch, DeviceBatches
from mtkit.training.objective import NLL, REWARD, SEGMENTS, Baseline, Objective
from mtkit.training.optimization.averaging import MovingAverage
from mtkit.training.optimization.divergence import Divergence
from mtkit.training.optimization.gradient_reduction import (
    FlatReduction,
    ShardedModel,
    build_reduction,
    gather_full,
    shard_like,
)
from mtkit.training.optimization.low_weights import LowWeights
from mtkit.training.optimization.optimizer import build_optimizer, optimizer_tensors, restore_optimizer
from mtkit.training.optimization.recorded_passes import TOO_LARGE, RecordedPasses, can_be_recorded
from mtkit.training.optimization.schedule import peak_rate
from mtkit.training.precision import Precision
from mtkit.training.progress import Progress
from mtkit.training.step import StepResult, training_step
from mtkit.training.world import World


class Updater:
    """Applies updates to a model; all measurements stay on the device until they are read."""

    def __init__(self, model: Network, recipe: Recipe, world: World, precision: Precision, say: Say = quiet) -> None:
        """`say` prints a line for the user if memory turns out to be short.

        Raises: RunError if the model cannot be sharded as the recipe requires, or its optimiser state does not fit.
        """
        self.model = model
        self.world = world
        self.precision = precision
        model.checkpoints_activations = recipe.training.checkpoint_activations
        self._sharded: ShardedModel | None = None
        if recipe.training.shard and world.size > 1:
            if precision.scaler is not None:
                raise RunError("training.shard cannot scale losses as float16 needs it; set --precision float32")
            self._sharded = ShardedModel(model, world, recipe.training.sum_gradients_in, self._blank_objective)
        self._reduction = self._sharded or build_reduction(model, world, recipe.training.sum_gradients_in)
        peak = peak_rate(recipe.training, recipe.model.d_model)
        self.optimizer = build_optimizer(model, recipe.training, world.size, peak=peak)
        self.objective = Objective(recipe.training, world.device)
        self.low_weights = LowWeights(model)
        self.average: MovingAverage | None = None
        self.divergence = Divergence(len(model.output_weight), world.device, Progress())
        self.max_batch_size: int | None = None
        """The largest batch (`Batch.size`) that is expected to fit in memory, once a batch did not."""
        self._say = say
        self._recipe, self._settings = recipe, recipe.training
        self._recorded: RecordedPasses | None = None
        self._sums = torch.zeros(8, device=world.device)
        self._failed = torch.zeros((), dtype=torch.int64, device=world.device)
        self._check_memory()
        if self._settings.ema > 0:
            self.average = MovingAverage(self.model, self._settings.ema)

    def run(self, work: UpdateBatches, number: int, *, rate: float, total_updates: int) -> None:
        """Make update `number` (1, 2, ...) at this learning rate, unless loss or gradient is not finite."""
        result = self._step(work.batches, work.tokens, number, rate)
        assert result is not None
        totals, norm = result.totals, result.gradient_norm
        self._failed = torch.where((self._failed == 0) & ~result.applied, number, self._failed)
        finite = norm.isfinite()
        self._sums += torch.cat([totals, torch.stack([norm.where(finite, 0.0), finite])])
        self.objective.baseline.follow(totals[REWARD], totals[SEGMENTS])
        self.divergence.follow(totals[NLL] / work.tokens, number)
        self.model.after_update(number, total_updates)
        if self.average is not None:
            self.average.follow(number)

    def dry_run(self, batches: Sequence[Batch]) -> None:
        """Compute gradients of the largest batches before the first update; changes only `max_batch_size`.

        Raises: RunError if a single segment does not fit in memory.
        """
        if self._sharded is not None:  # passes are steps of all processes together
            return
        buffers = self._copy_buffers()
        trained = [] if self.optimizer.state else [weight for weight in self.model.parameters() if weight.requires_grad]
        moments = [torch.empty_like(weight) for weight in trained for _ in range(2)]  # allocated later
        device = self.world.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for batch in batches:
                self._step([batch], batch.target_tokens, 0, None)
        del moments
        self.optimizer.zero_grad(set_to_none=True)
        self._restore_buffers(buffers)

    @property
    def recorded_shapes(self) -> int:
        """The number of batch shapes that have a CUDA graph."""
        return 0 if self._recorded is None else self._recorded.shapes

    def first_failed(self) -> int | None:
        """Return the first update whose loss or gradient was not finite, or None. Waits for the device."""
        return int(self._failed) or None

    def read(self) -> list[float]:
        """Return totals (`mtkit.training.objective`), gradient norms and updates made, summed since the last reading.

        An update whose norm is not finite does not count: float16 skips it. Waits for the device.
        """
        sums: list[float] = self._sums.tolist()
        self._sums.zero_()
        return sums

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Trained weights, buffers and moments by checkpoint file, unsharded, on the first process.

        All processes must call it: each may have a part of them.
        """
        files = {
            "model": self._unsharded(trained_state(self.model)),
            "optimizer": self._unsharded(optimizer_tensors(self.model, self.optimizer)),
        }
        if self.average is not None:
            with self.average.in_place():
                files["ema"] = self._unsharded(trained_state(self.model))
        return files

    def frozen(self) -> Mapping[str, Tensor]:
        """Return the weights that are not trained, like `tensors`."""
        return self._unsharded(frozen_state(self.model))

    @contextmanager
    def validation_weights(self) -> Iterator[None]:
        """Inside, the model computes with the weights to validate, unsharded: the moving average if there is one.

        Frees the gradients of the last update.
        """
        self.optimizer.zero_grad(set_to_none=True)
        with (
            self.average.in_place() if self.average else nullcontext(),
            self._sharded.unsharded() if self._sharded else nullcontext(),
        ):
            yield

    def load(self, weights: Mapping[str, Tensor], origin: Path) -> None:
        """Load unsharded weights into the model. Raises: RunError if they belong to another model."""
        state = self.model.state_dict()
        parts = {name: shard_like(value, state[name]) if name in state else value for name, value in weights.items()}
        load_weights(self.model, parts, origin)

    def save_state(self, progress: Progress) -> Progress:
        """Return the place in training, with the few numbers that the updater keeps."""
        scaler = self.precision.scaler
        progress = self.divergence.save_state(progress)
        baseline = self.objective.baseline.save()
        return replace(progress, baseline=baseline, scaler=scaler.state_dict() if scaler else None)

    def restore(self, progress: Progress, tensors: Mapping[str, Mapping[str, Tensor]], origin: Path) -> None:
        """Restore what `tensors` and `save_state` returned; "model" includes the frozen weights.

        Raises: RunError if they belong to another model.
        """
        self.load(tensors["model"], origin)
        restore_optimizer(self.model, self.optimizer, tensors["optimizer"], origin)
        if self.average is not None:
            with self.average.in_place():
                self.load({**frozen_state(self.model), **tensors["ema"]}, origin)
        self.objective.baseline = Baseline(self.world.device, progress.baseline)
        self.divergence = Divergence(len(self.model.output_weight), self.world.device, progress)
        if self.precision.scaler is not None and progress.scaler is not None:
            self.precision.scaler.load_state_dict(progress.scaler)

    def _unsharded(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors if self._sharded is None else gather_full(tensors, keep=self.world.first)

    def _step(self, batches: Sequence[Batch], tokens: int, number: int, rate: float | None) -> StepResult | None:
        """`training_step` on these batches, each in as many parts as memory requires; without a rate, a dry run.

        If memory runs out in any pass, the step begins again with that batch's halves. Losses are sums over the
        update's tokens, so the gradient is the same, except for dropout, which each part draws, and for attention
        losses over the source, which weigh each part by its target tokens.
        """
        buffers = self._copy_buffers()
        # gradients that overlap their sum over processes are sent in the weights' type
        lowers = self.precision.lowers_weights and isinstance(self._reduction, FlatReduction)
        if lowers:
            self.low_weights.refresh()
        while True:
            seed_generators(self._recipe.seed, number, self.world.rank)
            fitting = [*self._halved(batches)]
            # parts of halved batches have shapes that hardly come again
            recorded = self._records() if rate is not None and len(fitting) == len(batches) else None
            parts = DeviceBatches(fitting, self._load if recorded is None else self._load_on_grid)
            try:
                with (
                    self.precision.products(),
                    triton_kernels(self.precision.kernels),
                    float32_products(self.model),
                ):
                    return training_step(
                        self.model,
                        parts,
                        tokens,
                        objective=self.objective,
                        optimizer=self.optimizer,
                        reduction=self._reduction,
                        precision=self.precision,
                        low_weights=self.low_weights.in_place if lowers else nullcontext,
                        recorded=recorded,
                        clip_norm=self._settings.clip_norm,
                        rate=rate,
                    )
            except OOM_ERRORS as error:
                # only passes over batches can be repeated, and of sharded models none
                if parts.current is None or self._sharded is not None or not is_oom(error):
                    raise
            # outside `except`, no error keeps the failed pass's tensors alive
            self.optimizer.zero_grad(set_to_none=True)
            if recorded is not None and recorded.shapes:
                recorded.give_up(TOO_LARGE)
            else:
                self._halve_from_now_on(parts.current)
            self._restore_buffers(buffers)

    def _load(self, batch: Batch) -> DeviceBatch:
        return DeviceBatch.of(batch, self.world.device)

    def _load_on_grid(self, batch: Batch) -> DeviceBatch:
        return DeviceBatch.on_grid(batch, self.world.device)

    def _records(self) -> RecordedPasses | None:
        """Return what repeats passes from CUDA graphs, if that is chosen and possible: on one GPU, of whole models."""
        if not self.precision.graphs or self.world.size > 1 or not can_be_recorded(self._recipe):
            return None
        if self._recorded is None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self._recorded = RecordedPasses(trained, self._say)
        return self._recorded if self._recorded.records else None

    def _halved(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the batches, halved until each is expected to fit in memory; a single segment is not halved."""
        for batch in batches:
            if self.max_batch_size is not None and batch.size > self.max_batch_size and len(batch.source) > 1:
                yield from self._halved(batch.halves())
            else:
                yield batch

    def _blank_objective(self) -> Tensor:
        """Return an objective of weight 0, for a process without rows: sharded layers communicate in their passes."""
        buffers = self._copy_buffers()
        batch = blank_batch(several_directions=len(self._recipe.data.directions) > 1)
        loaded = self.objective.prepare(self._load(batch))
        with self.precision.autocast():
            output = self.model(**loaded.inputs)
            objective = self.objective(self.model, output, loaded, self.objective.new_totals())
        self._restore_buffers(buffers)
        return objective / math.inf

    def _halve_from_now_on(self, batch: Batch) -> None:
        """Halve batches of this size from now on. Raises: RunError if it is a single segment."""
        if len(batch.source) == 1:
            raise RunError(
                f"out of memory on {self.world.device} at a single segment of {batch.source.shape[1]} source "
                f"and {batch.target_in.shape[1]} target pieces (line {batch.lines[0]} of the training text); "
                + ("set training.checkpoint_activations: true, or " if self._can_keep_less else "")
                + "lower model.max_length, or the size of the model, under another --name"
            )
        self._say(
            f"out of memory on {self.world.device} at a batch of {len(batch.source)} segments and "
            f"{batch.size:,} pieces per side; such batches are computed in halves, with the same gradient"
        )
        self.max_batch_size = max(half.size for half in batch.halves())
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks cached in the larger batch's sizes

    @property
    def _can_keep_less(self) -> bool:
        """Whether activation checkpointing would save memory."""
        model, checkpointed = self._recipe.model, self._settings.checkpoint_activations
        return model.architecture == "transformer" and not model.reversible and not checkpointed

    def _check_memory(self) -> None:
        """Raises: RunError on a CPU without memory for gradients, moments and averages of the weights."""
        if self.world.device.type != "cpu" or self._sharded is not None:
            return
        weights = sum(parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)
        needed = weights * (4 if self._settings.ema else 3)
        if needed > (available := available_bytes()):
            raise RunError(
                f"gradients and optimiser state of the model's weights would take {in_words(needed)} of memory, and "
                f"{in_words(available)} are available here: {SMALLER}"
            )

    def _copy_buffers(self) -> list[Tensor]:
        """Copies of the buffers, which forward passes may change: some attentions gather statistics."""
        return [buffer.clone() for buffer in self.model.buffers()]

    def _restore_buffers(self, copies: Sequence[Tensor]) -> None:
        for buffer, copy in zip(self.model.buffers(), copies, strict=True):
            buffer.copy_(copy)


def seed_generators(seed: int, update: int, rank: int) -> None:
    """Seed the generators of an update from seed, update and process.

    Dropout then does not depend on anything before the update, such as a validation or an interruption.
    """
    torch.manual_seed(int(np.random.SeedSequence((seed, update, rank)).generate_state(1, np.uint64)[0]))
