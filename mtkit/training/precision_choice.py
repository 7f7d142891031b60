"""Choose how to compute updates by measuring them: float32 or bfloat16 on a CPU, Triton and CUDA graphs on a GPU.

Before training begins, each candidate makes a few updates on a copy of the model, with batches of the run's data. The
training is bit for bit the same as with the choice set. run.json records it, and a resumed run keeps it on any machine.
Kernels in Triton take a GPU less time than PyTorch's, but a host may need longer to start them; CUDA graphs take it
little time, but not every mechanism can be recorded. A candidate with graphs must give the gradient of the one without.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from mtkit.device import seconds_of
from mtkit.errors import cut_words
from mtkit.memory import OOM_ERRORS, forget_peak, is_oom
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.runs import Run, can_resume
from mtkit.terminal import Say, quiet
from mtkit.training.data_loader import DataLoader, UpdateBatches
from mtkit.training.optimization.recorded_passes import can_be_recorded
from mtkit.training.precision import Precision, update_precisions
from mtkit.training.run_folder import record
from mtkit.training.update import Updater
from mtkit.training.world import World

LIMIT, FIRST_LIMIT = 3.0, 12.0
"""Seconds after which no more updates are measured; a second round follows a first of up to `FIRST_LIMIT` seconds."""

WIDTHS = 3
"""Batches of different widths that are measured."""

SAME = 0.05
"""Distance between results of CUDA graphs and computed ones, relative to these, that rounding explains."""

ATTEMPTS = 8
"""Updates in float16 until the loss scale fits."""


@dataclass(frozen=True)
class Faster:
    """The fastest candidate that was measured."""

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
    """Choose the precision of the run in the folder, and whether Triton's kernels and CUDA graphs are used.

    All processes return the same. It is measured if the run is new, and all machines have a choice. Neither kernels nor
    graphs are used if `training.deterministic` is set, or with several GPUs. A sharded model is not copied to measure
    it.
    """
    setting, about, device = recipe.training.precision, Run(folder).about, world.device
    if setting == "auto" and "precision" in about:
        setting = about["precision"]
    if "kernels" in about:
        graphs = about.get("graphs", False) and device.type == "cuda"
        return Precision(setting, device, kernels=about["kernels"], graphs=graphs)
    candidates = possible_precisions(recipe, setting, world)
    (fewest,) = world.agree(-len(candidates))  # candidates of all machines
    candidates = candidates[: -int(fewest)]
    sharded = recipe.training.shard and world.size > 1
    if can_resume(folder) or sharded:
        candidates = [Precision(setting, device)]
    chosen = candidates[0]
    if len(candidates) > 1:
        chosen = _measured(recipe, model, data, world, candidates, say)
    if world.first and not can_resume(folder):
        if setting == "auto":
            record(folder, "precision", chosen.name)
        if device.type == "cuda" and len(candidates) > 1:
            record(folder, "kernels", chosen.kernels)
            record(folder, "graphs", chosen.graphs)
    return Precision(setting, device, kernels=chosen.kernels, graphs=chosen.graphs) if chosen.scaler else chosen


def possible_precisions(recipe: Recipe, setting: str, world: World) -> list[Precision]:
    """Return the ways to compute the recipe's updates in this world with this `training.precision`."""
    candidates = update_precisions(setting, world.device, graphs=can_be_recorded(recipe))
    alone = world.device.type != "cuda" or not (recipe.training.deterministic or world.size > 1)
    return candidates if alone else candidates[:1]


def _measured(
    recipe: Recipe, model: Network, data: DataLoader, world: World, candidates: Sequence[Precision], say: Say
) -> Precision:
    """Return the fastest candidate, or the first if the memory does not hold a copy of the model."""
    try:
        choice = measure_precisions(recipe, model, data.samples(WIDTHS), world, candidates, say)
    except OOM_ERRORS as error:
        if not is_oom(error) or world.size > 1:
            raise
        return candidates[0]
    forget_peak()  # reports compare the peak memory of training
    if choice.other != choice.name:
        say(str(choice))
    return next(precision for precision in candidates if str(precision) == choice.name)


def measure_precisions(
    recipe: Recipe,
    model: Network,
    batches: Sequence[UpdateBatches],
    world: World,
    candidates: Sequence[Precision],
    say: Say = quiet,
) -> Faster:
    """Time updates of one batch each with each candidate; the model does not change.

    The first batch is not timed: a process's first update also initialises libraries. The others run twice, and again
    while there is time; each counts with its fastest time, of the slowest process, because a new shape first needs
    its kernels. Batches that ran only once count if all did.
    """
    choices = {str(precision): precision for precision in candidates}
    names, on_gpu = list(choices), world.device.type == "cuda"
    with torch.random.fork_rng([world.device] if on_gpu else []):
        updater = Updater(deepcopy(model).train(), recipe, world, candidates[0], say)

        def seconds(work: UpdateBatches, name: str, number: int) -> float:
            updater.precision = choices[name]
            update = partial(updater.run, work, number, rate=0.0, total_updates=number)
            return world.agree(seconds_of(update, world.device, monotonic))[0]

        first, *others = batches
        for name in list(names):
            try:
                seconds(first, name, 1)
            except Exception as error:  # of Triton and its C compiler
                if is_oom(error) or not choices[name].kernels:
                    raise
                say(f"without {name.removeprefix(choices[name].name + ' with ')}: {cut_words(str(error))}")
                names.remove(name)
        for name in [name for name in names if choices[name].graphs]:
            for work in others:
                seconds(work, name, 1)  # records it
            if updater.recorded_shapes and not _same_gradient(updater, choices, name, others[-1]):
                say("without CUDA graphs: their gradients are not those of computed passes")
                names.remove(name)
            elif not updater.recorded_shapes:
                names.remove(name)
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


def _same_gradient(updater: Updater, choices: dict[str, Precision], name: str, work: UpdateBatches) -> bool:
    """Return whether passes over a recorded batch, with other tokens, have the gradient that computed passes have."""
    batch, vocabulary = work.batches[0], len(updater.model.output_weight)
    other = replace(
        batch,
        source=batch.source.flip(0),
        source_valid=batch.source_valid.flip(0),
        target_out=(batch.target_out + 1) % vocabulary,
    )
    computed = next(each for each in choices.values() if each.kernels == choices[name].kernels and not each.graphs)
    for _ in range(ATTEMPTS):
        results: list[tuple[list[float], dict[str, Tensor]]] = []
        for precision in (computed, computed, choices[name]):  # the second follows the same statistics as the third
            updater.precision = precision
            updater.run(replace(work, batches=[other]), 2, rate=0.0, total_updates=2)
            weights = updater.model.named_parameters()
            gradients = {key: weight.grad.clone() for key, weight in weights if weight.grad is not None}
            results = [*results[-1:], (updater.read(), gradients)]
        (wanted_sums, wanted), (sums, found) = results
        if wanted_sums[-1] and sums[-1]:  # float16 lowers its loss scale if a gradient is not finite
            break
    if wanted.keys() != found.keys() or any(abs(a - b) > SAME * abs(a) for a, b in zip(wanted_sums, sums, strict=True)):
        return False
    total = torch.nn.utils.get_total_norm(list(wanted.values()))
    return all(bool((found[key] - wanted[key]).norm() <= SAME * (wanted[key].norm() + 0.1 * total)) for key in wanted)
