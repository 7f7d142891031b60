"""CUDA graphs: updates with them beside updates without, and the speed of decoding with recorded steps."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mtkit.data.prepared import Prepared
from mtkit.decoding.engines import model_engine
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.step_graphs import StepGraphs
from mtkit.decoding.translate import translate_lines
from mtkit.device import has_triton
from mtkit.recipe import DecodingSettings, Recipe, make_recipe
from mtkit.training import update
from mtkit.training.data_loader import UpdateBatches
from mtkit.training.optimization.recorded_passes import RecordedPasses
from mtkit.training.precision import Precision, fast_and_repeatable
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.gpu.check import Result, Setup, guarded
from tests.gpu.machine import wait
from tests.gpu.speed import news
from tests.gpu.training import builtin, distance, mechanism_recipes, model_of, own, small, work_of
from tests.operations import record_operations

CASES: list[tuple[dict[str, str], int, torch.dtype | None]] = [
    ({}, 1, torch.bfloat16),
    ({}, 4, torch.bfloat16),
    ({}, 4, None),
    ({"decoder": "gla"}, 4, torch.bfloat16),
    ({"decoder": "linear", "cross": "linear"}, 4, torch.bfloat16),
    ({"decoder": "sigmoid"}, 4, torch.bfloat16),
]


def step_graphs(setup: Setup) -> Iterator[Result]:
    """Seconds of 600 lines by an untrained model, which ends hardly any before its 100th piece."""
    for attention, beam, dtype in CASES[:2] if setup.tiny else CASES:
        name = f"{attention or 'full'} beam {beam} {dtype or torch.float32}"
        yield guarded(name, lambda a=attention, b=beam, d=dtype: _measured(setup, a, b, d))


def _measured(setup: Setup, attention: dict[str, str], beam: int, dtype: torch.dtype | None) -> Result:
    prepared = news(setup)
    recipe = make_recipe({"preset": "tiny" if setup.tiny else "base", "attention": attention})
    given: dict[str, Any] = {"method": "beam" if beam > 1 else "greedy", "beam": beam}
    settings = DecodingSettings.model_validate(given | {"max_pieces": 5 if setup.tiny else 100})
    engine = ModelEngine(model_of(recipe, prepared, setup.device), settings, dtype)
    lines = prepared.tests["test"].source_text[: 8 if setup.tiny else 600]
    result: Result = {}
    for way, graphs in (("graphs", StepGraphs), ("without", lambda model: model)):
        model_engine.StepGraphs = graphs  # type: ignore[misc, assignment]
        for _ in range(2):  # the first allocates memory
            wait(setup.device)
            begin = time.perf_counter()
            found = [each[0] for each in translate_lines(engine, prepared.tokenizers, lines)]
            wait(setup.device)
            result[way] = round(time.perf_counter() - begin, 3)
        result[f"{way}_pieces"] = sum(len(each.pieces) for each in found)
    return result


UPDATES = 6


def update_graphs(setup: Setup) -> Iterator[Result]:
    """Updates of every mechanism with passes from CUDA graphs, and the same updates computed.

    Two shapes of batches take turns, with other contents each time.
    """
    prepared = builtin(setup)
    for name, recipe in own(setup, [*mechanism_recipes(setup), *GRAPH_CASES]):

        def compute(recipe: Recipe = recipe) -> Result:
            kernels = setup.device == "cuda" and has_triton()
            computed, repeated = (
                Precision("bfloat16", torch.device(setup.device), kernels=kernels, graphs=graphs)
                for graphs in (False, True)
            )
            said = list[str]()
            found = [_updates(setup, recipe, prepared, way, said) for way in (computed, repeated)]
            (_, wanted, losses), (shapes, weights, other_losses) = found
            apart = max(distance(weights[key], wanted[key]) for key in wanted if not key.endswith("k_proj.bias"))
            losses_apart = max(abs(one / other - 1) for one, other in zip(other_losses, losses, strict=True))
            recorded = shapes == 2 or setup.device == "cpu"  # some mechanisms ask their tensors on a CPU
            return {"ok": recorded and apart < 1e-2 and losses_apart < 1e-3, "apart": apart,
                    "losses_apart": losses_apart, "shapes": shapes, "said": said}  # fmt: skip

        yield guarded(f"update graphs {name}", compute)


GRAPH_CASES = [
    ("dropout, post", small(model={"norm": "post", "dropout": 0.1})),
    ("r_drop, muon", small(model={"dropout": 0.1}, training={"r_drop": 1.0, "optimizer": "muon"})),
    ("accumulate", small(model={"dropout": 0.1}, training={"accumulate": 2})),
]


def _updates(
    setup: Setup, recipe: Recipe, prepared: Prepared, way: Precision, said: list[str]
) -> tuple[int, dict[str, Tensor], list[float]]:
    """The number of recorded shapes, the weights after all updates, and the loss of each."""
    losses = []
    recorder = partial(RecordedPasses, record=record_operations) if setup.device == "cpu" else RecordedPasses
    with (
        World(setup.device) as world,
        fast_and_repeatable(world.device),
        patch.object(update, "RecordedPasses", recorder),
    ):
        updater = Updater(model_of(recipe, prepared, setup.device), recipe, world, way, said.append)
        for number in range(1, UPDATES + 1):
            firsts = [16 * (number + 10 * each) for each in range(recipe.training.accumulate)]
            # cut to one of two shapes
            work = [cut(work_of(prepared, range(first, first + 8 + number % 2 * 4)), 12) for first in firsts]
            batches = [each.batches[0] for each in work]
            together = replace(work[0], batches=batches, tokens=sum(each.target_tokens for each in batches))
            updater.run(together, number, rate=1e-3, total_updates=UPDATES)
            losses.append(updater.read()[0] / together.tokens)
        weights = {name: value.detach().cpu() for name, value in updater.model.named_parameters()}
    return updater.recorded_shapes, weights, losses


def cut(work: UpdateBatches, width: int) -> UpdateBatches:
    """The update with both sides of its batch cut to this width, at most."""
    (batch,) = work.batches
    sides = {name: value[:, :width].contiguous() for name, value in vars(batch).items()
             if isinstance(value, Tensor) and value.dim() == 2}  # fmt: skip
    return replace(work, batches=[replace(batch, **sides, target_tokens=int(sides["target_valid"].sum()))])
