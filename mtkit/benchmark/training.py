"""Benchmark of training speed: programs, attentions and precisions on the same batches, in turns, in one process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Protocol

import numpy as np
import torch

from mtkit.benchmark.cost import cost_of
from mtkit.data.prepared import Prepared
from mtkit.device import seconds_of
from mtkit.errors import MtkitError
from mtkit.model.build import build_model, label_attention
from mtkit.model.network import Network
from mtkit.model.sublayers import forget_pools
from mtkit.product_rate import Rate, arithmetic_of, product_rate
from mtkit.recipe import Recipe
from mtkit.training.data_loader import DataLoader, UpdateBatches
from mtkit.training.flops import training_operations
from mtkit.training.objective import LOSS
from mtkit.training.optimization.schedule import build_schedule
from mtkit.training.precision import Precision, fast_and_repeatable
from mtkit.training.precision_choice import possible_precisions
from mtkit.training.update import Updater
from mtkit.training.world import World

TURN = 10
"""Number of updates in a trainer's turn."""

COUNTED = 3
"""Number of first updates whose memory is measured; they belong to the warm-up."""


class Trainer(Protocol):
    """One program's training of one model."""

    program: str
    attention: str
    precision: str

    @property
    def model(self) -> torch.nn.Module:
        """Model that is trained."""

    def arithmetic(self) -> AbstractContextManager[object]:
        """Context with the process settings that this program trains with."""

    def update(self, work: UpdateBatches, number: int) -> None:
        """Do update `number`, counted from 1."""

    def read_loss(self) -> float:
        """Return the label-smoothed loss summed over the target tokens since the last call; waits for the device."""


class OwnTrainer:
    """mtkit's training, with the model, data feed, update and schedule of `mtkit train`."""

    program = "mtkit"

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        world: World,
        precision: Precision | None = None,
        attention: str | None = None,
    ) -> None:
        """Build the model; `recipe` also describes the data, and the precision if there is no other.

        `attention` is the name of its rows, which differ between recipes of one mechanism; None: by its mechanisms.

        Raises: RecipeError and MtkitError if the model cannot be built; RunError for an unsupported precision.
        """
        self.attention = label_attention(recipe) if attention is None else attention
        precision = precision or Precision(recipe.training.precision, world.device)
        self.precision, self._graphs = str(precision), precision.graphs
        self.model: Network = build_model(recipe, **prepared.model_sizes).to(world.device)
        self._updater = Updater(self.model, recipe, world, precision)
        self._schedule = build_schedule(recipe.training, recipe.model.d_model)
        self._device, self._deterministic = world.device, recipe.training.deterministic

    def arithmetic(self) -> AbstractContextManager[object]:
        """Context with the arithmetic settings of `mtkit train`."""
        return fast_and_repeatable(self._device, deterministic=self._deterministic)

    def update(self, work: UpdateBatches, number: int) -> None:
        """Do an update as at the start of `mtkit train`."""
        self._updater.run(work, number, rate=self._schedule(number, 0.0), total_updates=max(number, 100_000))

    def read_loss(self) -> float:
        """Return the loss from the running sums of the training. Raises: MtkitError if CUDA graphs have failed."""
        if self._graphs and not self._updater.recorded_shapes:
            raise MtkitError("passes of this model cannot be recorded as CUDA graphs here")
        return self._updater.read()[LOSS]


def own_trainers(
    recipes: Sequence[tuple[str | None, Recipe]], prepared: Prepared, world: World, precisions: Sequence[str]
) -> list[OwnTrainer]:
    """Make a trainer for each name and recipe in each precision; `precisions` are values of `training.precision`.

    Raises: as `OwnTrainer`.
    """

    def ways(recipe: Recipe) -> Iterable[Precision]:  # each has a loss scale of its own
        possible = [way for name in precisions for way in possible_precisions(recipe, name, world)]
        return {str(way): way for way in possible}.values()

    return [OwnTrainer(recipe, prepared, world, way, name) for name, recipe in recipes for way in ways(recipe)]


@dataclass(frozen=True)
class Plan:
    """Number of measured updates and of warm-up updates, on the batches of the recipe's first epochs."""

    updates: int = 100
    warmup: int = 20


@dataclass
class Trained:
    """Results of one trainer; a turn is TURN updates."""

    program: str
    attention: str
    precision: str
    parameters: int
    peak_bytes: int = 0
    """Weights plus the peak of other training memory: gradients, moments and activations."""
    operations: float | None = None
    """Necessary operations per target token; None for a program whose model mtkit cannot count."""
    tokens: list[int] = field(default_factory=list)
    """Real target tokens of each turn."""
    seconds: list[float] = field(default_factory=list)
    """Time of each turn, including the wait for batches."""
    loss: float = 0.0
    """Label-smoothed loss per target token over all turns, in nats."""
    failed: str | None = None
    """Error that stopped this trainer, or None; after an error, the other numbers are meaningless."""

    @property
    def speed(self) -> float:
        """Real target tokens per second over all turns."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def median(self) -> float:
        """Median speed of the turns."""
        return median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))


@dataclass(frozen=True)
class TrainingBenchmark:
    """Results of all trainers."""

    recipe: Recipe
    plan: Plan
    device: torch.device
    processes: int
    rates: dict[str, Rate]
    rows: list[Trained]

    @property
    def measured(self) -> list[Trained]:
        """Rows that did not fail."""
        return [row for row in self.rows if row.failed is None]

    def share(self, row: Trained) -> float | None:
        """Return the rate of the row's necessary operations divided by the machine's rate in the row's arithmetic.

        None if one of them is unknown; with several processes, their rates are added.
        """
        rate = self.rates.get(arithmetic_of(row.precision))
        if rate is None or row.operations is None:
            return None
        return row.operations * row.speed / (rate.best * self.processes)


def measure_training(
    recipe: Recipe,
    prepared: Prepared,
    own: Sequence[OwnTrainer],
    peers: Sequence[Trainer],
    plan: Plan,
    world: World,
    *,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> TrainingBenchmark:
    """Train with each trainer in turns, on the same batches, and time all updates after the warm-up.

    `on_progress` receives the number of finished turns and of all turns. With several trainers in one process, the
    others continue if one fails, and its row has the error.

    Raises: MtkitError if no trainer remains; DataError if there is nothing to train on.
    """
    if plan.updates < 1 or plan.warmup < COUNTED:
        raise MtkitError(f"updates are whole numbers from 1, and warm-up updates from {COUNTED}")
    trainers: list[Trainer] = [*own, *peers]
    longest = min(min(trainer.model.longest_source, trainer.model.longest_target) for trainer in own)
    loader = DataLoader(recipe, prepared, longest, world)
    rates = _rates(recipe, trainers, world.device)
    turns = [min(TURN, plan.updates - first) for first in range(0, plan.updates, TURN)]
    rows = [_row(trainer) for trainer in trainers]
    work = [loader.updates(0, 0) for _ in trainers]
    done = 0

    def made(number: int = 1) -> None:
        nonlocal done
        done += number
        on_progress(done, len(trainers) * (len(turns) + 1))

    def attempt(row: Trained, work: Callable[[], object]) -> None:
        if row.failed is not None:
            return
        try:
            work()
        except Exception as error:
            if len(trainers) == 1 or world.size > 1:  # other processes would wait for this one
                raise
            reason, *_ = str(error).split("\n")
            row.failed = f"{type(error).__name__}: {reason}"

    rows_trained_on = np.concatenate([*islice(loader.plan(0), plan.warmup + plan.updates)])
    passes, operations = 2 if recipe.training.r_drop else 1, dict[str, float]()

    def count(trainer: OwnTrainer) -> None:
        if trainer.attention not in operations:
            counted = training_operations(trainer.model, loader.side(0), rows_trained_on)
            operations[trainer.attention] = passes * counted

    for mine, row in zip(own, rows, strict=False):
        attempt(row, partial(count, mine))
    for trainer, row, batches in zip(trainers, rows, work, strict=True):
        row.operations = operations.get(trainer.attention)
        attempt(row, partial(_warm_up, trainer, row, batches, plan, world))
        made()
    for turn, updates in enumerate(turns):
        for trainer, row, batches in zip(trainers, rows, work, strict=True):
            attempt(row, partial(_take_turn, trainer, row, batches, plan.warmup + turn * TURN, updates, world))
            made()
    for trainer, row in zip(trainers, rows, strict=True):
        attempt(row, partial(_read_loss, trainer, row))
    if all(row.failed for row in rows):
        raise MtkitError(f"nothing could be measured; {rows[0].attention} failed with {rows[0].failed}")
    return TrainingBenchmark(recipe, plan, world.device, world.size, rates, rows)


def _rates(recipe: Recipe, trainers: Sequence[Trainer], device: torch.device) -> dict[str, Rate]:
    """Measure the machine's rate in float32 and in every arithmetic of the trainers."""
    sizes = (recipe.model.d_model, recipe.model.feed_forward)
    names = dict.fromkeys(["float32", *(arithmetic_of(trainer.precision) for trainer in trainers)])
    measured = {name: product_rate(name, device, sizes) for name in names}
    return {name: rate for name, rate in measured.items() if rate is not None}


def _row(trainer: Trainer) -> Trained:
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    return Trained(trainer.program, trainer.attention, trainer.precision, parameters)


def _warm_up(trainer: Trainer, row: Trained, batches: Iterator[UpdateBatches], plan: Plan, world: World) -> None:
    """Do the first updates: they select kernels, create the optimiser's moments, and measure memory."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    forget_pools()  # the next trainer's memory includes them too
    with trainer.arithmetic():

        def first() -> None:
            for number in range(1, COUNTED + 1):
                trainer.update(next(batches), number)

        row.peak_bytes = weights + cost_of(first, world.device).peak_bytes
        for number in range(COUNTED + 1, plan.warmup + 1):
            trainer.update(next(batches), number)
    trainer.read_loss()


def _read_loss(trainer: Trainer, row: Trained) -> None:
    row.loss = trainer.read_loss() / sum(row.tokens)


def _take_turn(
    trainer: Trainer, row: Trained, batches: Iterator[UpdateBatches], before: int, count: int, world: World
) -> None:
    """Do and time `count` updates together: the device computes while the next one is prepared."""
    tokens = 0

    def work() -> None:
        nonlocal tokens
        for number in range(before + 1, before + count + 1):
            work = next(batches)
            trainer.update(work, number)
            tokens += work.tokens

    with trainer.arithmetic():
        world.agree()  # all processes begin together
        row.seconds.append(seconds_of(work, world.device))
    row.tokens.append(tokens)
