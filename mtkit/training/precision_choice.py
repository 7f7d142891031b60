"""Resolve `precision: auto` on a CPU with bfloat16 units: measure which of float32 and bfloat16 is faster.

A few updates of both are made on a copy of the model, on batches of the run's data, before training begins. The
training is bit for bit the same as with that precision set. run.json records the choice, and a resumed run keeps it on
any machine.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch

from mtkit.memory import forget_peak
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.runs import Run, can_resume
from mtkit.training.data_loader import DataLoader, UpdateBatches
from mtkit.training.metrics import Say
from mtkit.training.precision import Precision, precisions
from mtkit.training.run_folder import record
from mtkit.training.update import Updater
from mtkit.training.world import World

LIMIT, FIRST_LIMIT = 3.0, 12.0
"""Seconds after which no more updates are measured; a second round follows a first of up to `FIRST_LIMIT` seconds."""

WIDTHS = 3
"""Batches of different widths that are measured."""


@dataclass(frozen=True)
class Faster:
    """The fastest of the precisions that were measured."""

    name: str
    other: str
    """The slowest."""
    ratio: float
    """Its time over the fastest one's."""
    updates: int
    """Updates of each that were measured."""

    def __str__(self) -> str:
        updates = f"{self.updates} update{'s' if self.updates > 1 else ''} of each"
        return f"{self.name}: {self.ratio:.2f} times as fast as {self.other} here ({updates})"


def resolve_precision(
    recipe: Recipe, folder: Path, model: Network, data: DataLoader, world: World, say: Say
) -> Precision:
    """The precision that the run in the folder trains in, the same in all processes on CPUs.

    Measures it if the run is new, `training.precision` is auto, and the machine has a choice.
    """
    setting = recipe.training.precision
    if setting != "auto" or (recipe.training.shard and world.size > 1):  # a sharded model is not copied to measure
        return Precision(setting, world.device)
    recorded = Run(folder).about.get("precision")
    if recorded is not None:
        return Precision(recorded, world.device)
    names = precisions(world.device)
    (fewest,) = world.agree(-len(names))  # the precisions that all machines have
    names = names[: -int(fewest)]
    if can_resume(folder):  # by a version that measured nothing
        return Precision("auto", world.device)
    if len(names) == 1:
        return Precision(names[0], world.device)
    choice = measure_precisions(recipe, model, data.samples(WIDTHS), world, names)
    forget_peak()  # reports compare the peak memory of training
    if world.first:
        record(folder, "precision", choice.name)
    say(str(choice))
    return Precision(choice.name, world.device)


def measure_precisions(
    recipe: Recipe, model: Network, batches: Sequence[UpdateBatches], world: World, names: Sequence[str]
) -> Faster:
    """Time updates of one batch each in each of the precisions; the model does not change.

    The first batch is not timed: a process's first update also initialises libraries. The others run twice, and again
    while there is time; each counts with its fastest time, of the slowest process, because a new shape first needs
    its kernels. Batches that ran only once count if all did.
    """
    choices = {name: Precision(name, world.device) for name in names}
    with torch.random.fork_rng(devices=[]):
        updater = Updater(deepcopy(model).train(), recipe, world, choices[names[0]])

        def seconds(work: UpdateBatches, name: str, number: int) -> float:
            updater.precision, begin = choices[name], monotonic()
            updater.run(work, number, rate=0.0, total_updates=number)
            return world.agree(monotonic() - begin)[0]

        first, *others = batches
        for name in names:
            seconds(first, name, 1)
        places = range(len(others))
        times: dict[str, list[list[float]]] = {name: [[] for _ in places] for name in names}
        spent, turns = 0.0, 0
        for place in (*sorted((*places, *places)), *places):
            turns += 1
            for name in names if turns % 2 else reversed(names):
                times[name][place].append(seconds(others[place], name, turns + 1))
                spent += times[name][place][-1]
            if spent >= (LIMIT if turns > 1 else FIRST_LIMIT):
                break
    most = min(2, max(map(len, times[names[0]])))
    counted = [place for place in places if len(times[names[0]][place]) >= most]
    total = {name: sum(min(times[name][place]) for place in counted) for name in names}
    fastest, slowest = min(total, key=total.__getitem__), max(reversed(names), key=total.__getitem__)
    return Faster(fastest, slowest, total[slowest] / max(total[fastest], 1e-9), turns)
