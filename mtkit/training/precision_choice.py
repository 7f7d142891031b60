"""What `precision: auto` is on a CPU that has bfloat16 units: the faster of float32 and bfloat16, measured.

A few updates of both are made on a copy of the model, on batches of the run's own data, before the training begins. The
training that follows is bit for bit that with the precision given. The choice is kept in run.json: a resumed run takes
it too, on whatever machine.
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
from mtkit.training.data_loader import Feed, Work
from mtkit.training.metrics import Say
from mtkit.training.precision import Precision, precisions
from mtkit.training.run_folder import keep_precision
from mtkit.training.update import Updater
from mtkit.training.world import World

LIMIT, AT_MOST = 3.0, 12.0
"""Seconds after which no more updates are measured; where one update of each took up to the latter, a second one is."""

WIDTHS = 3
"""Batches of different widths that are measured."""


@dataclass(frozen=True)
class Faster:
    """The faster of the precisions that were measured."""

    name: str
    other: str
    """The slowest."""
    ratio: float
    """How many times as fast as that it is."""
    updates: int
    """Updates of each that were measured."""

    def __str__(self) -> str:
        updates = f"{self.updates} update{'s' if self.updates > 1 else ''} of each"
        return f"{self.name}: {self.ratio:.2f} times as fast as {self.other} here ({updates})"


def settle(recipe: Recipe, folder: Path, model: Network, feed: Feed, world: World, say: Say) -> Precision:
    """The precision that the run in the folder trains in, the same in all processes on CPUs.

    It is measured where a new run leaves it to a machine that has a choice.
    """
    setting = recipe.training.precision
    if setting != "auto" or (recipe.training.shard and world.size > 1):  # split weights are not copied to measure
        return Precision(setting, world.device)
    kept = Run(folder).about.get("precision")
    if kept is not None:
        return Precision(kept, world.device)
    names = precisions(world.device)
    (fewest,) = world.agree(-len(names))  # what the processes' machines have in common
    names = names[: -int(fewest)]
    if can_resume(folder):  # by a version that measured nothing
        return Precision("auto", world.device)
    if len(names) == 1:
        return Precision(names[0], world.device)
    choice = measured(recipe, model, feed.samples(WIDTHS), world, names)
    forget_peak()  # a comparison reports that of the training alone
    if world.first:
        keep_precision(folder, choice.name)
    say(str(choice))
    return Precision(choice.name, world.device)


def measured(recipe: Recipe, model: Network, batches: Sequence[Work], world: World, names: Sequence[str]) -> Faster:
    """Make updates on these batches, of one each, in each of the precisions; the model stays as it is.

    The first batch is not timed: with it, what the first update of a process takes is over. The others come twice, and
    then again while there is time; of each its fastest time counts, and of several processes the slowest one's, so that
    the kernels that a new shape needs are made before. A batch that time allowed but once counts if there is no other.
    """
    choices = {name: Precision(name, world.device) for name in names}
    with torch.random.fork_rng(devices=[]):
        updater = Updater(deepcopy(model).train(), recipe, world, choices[names[0]])

        def seconds(work: Work, name: str, number: int) -> float:
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
            if spent >= (LIMIT if turns > 1 else AT_MOST):
                break
    most = min(2, max(map(len, times[names[0]])))
    counted = [place for place in places if len(times[names[0]][place]) >= most]
    total = {name: sum(min(times[name][place]) for place in counted) for name in names}
    fastest, slowest = min(total, key=total.__getitem__), max(reversed(names), key=total.__getitem__)
    return Faster(fastest, slowest, total[slowest] / max(total[fastest], 1e-9), turns)
