"""Training on a GPU beside training on the CPU: learning, gradients, resumption, waits, memory."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from mtkit.attention import mechanisms
from mtkit.data.batches import make_batch
from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import Recipe, make_recipe, merged
from mtkit.recipe.data import DataSettings
from mtkit.terminal import Say
from mtkit.training import loop
from mtkit.training.checkpoint import verified_tensors
from mtkit.training.data_loader import DataLoader, UpdateBatches, count_tokens
from mtkit.training.metrics import read_metrics
from mtkit.training.optimization.recorded_passes import can_be_recorded
from mtkit.training.precision import Precision, fast_and_repeatable, fixed_workspaces, update_precisions
from mtkit.training.train import train
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.gpu.check import Result, Setup, guarded

SMALL: dict[str, Any] = {
    "model": {
        "d_model": 64,
        "heads": 4,
        "feed_forward": 128,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "dropout": 0.0,
        "max_length": 256,
    },
    "training": {
        "batch_tokens": 2000,
        "warmup_updates": 20,
        "peak_rate": 3e-3,
        "ema": 0.0,
        "log_every": 10,
        "validate_segments": 8,
        "label_smoothing": 0.0,
        "precision": "float32",
    },
    "decoding": {"method": "greedy"},
}


def builtin(setup: Setup) -> Prepared:
    """The prepared built-in corpus; made if it is missing, which needs the package `datasets`."""
    folder = setup.data / "builtin"
    if not folder.is_dir():
        given = {
            "folder": folder,
            "builtin": {"train": 3000, "valid": 100, "test": 100},
            "tokenizer": {"vocabulary": 800},
        }
        prepare(DataSettings.model_validate(given))
    return open_prepared(folder)


def small(**groups: Any) -> Recipe:
    """A small recipe with these groups over it."""
    return make_recipe(merged(SMALL, groups))


def own(setup: Setup, cases: list[Any]) -> list[Any]:
    """The cases of this process; a few of them in the dry run."""
    shard, shards = setup.shard
    return (cases[:: max(1, len(cases) // 4)] if setup.tiny else cases)[shard::shards]


def model_of(recipe: Recipe, prepared: Prepared, device: str) -> Network:
    """A new model, the same on every device."""
    torch.manual_seed(1)
    size = prepared.tokenizers.target.size
    return build_model(recipe, source_vocabulary=size, target_vocabulary=size).to(device).train()


def work_of(prepared: Prepared, *rows: range) -> UpdateBatches:
    """An update of one batch per range of rows."""
    arrays = [np.array(numbers) for numbers in rows]
    batches = [make_batch(prepared.train, numbers) for numbers in arrays]
    return UpdateBatches(batches, count_tokens(prepared.train, arrays), arrays, 0, len(rows))


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, relative to the norm of the second."""
    one, other = one.detach().double().cpu(), other.detach().double().cpu()
    return ((one - other).norm() / other.norm().clamp_min(1e-30)).item()


def ways(recipe: Recipe, precision: str, device: str) -> dict[str, Precision]:
    """The ways to compute updates of this recipe on the device, by name, whether they are faster here or not."""
    graphs = can_be_recorded(recipe)
    return {str(way): way for way in update_precisions(precision, torch.device(device), graphs=graphs)}


def train_in_one_way(recipe: Recipe, prepared: Prepared, folder: Path, device: str, number: int) -> None:
    """Train in the first (0) of the `ways`, which is PyTorch's, or in the last one (-1)."""

    def resolved(recipe: Recipe, folder: Path, model: Network, data: DataLoader, world: World, say: Say) -> Precision:
        return list(ways(recipe, recipe.training.precision, device).values())[number]

    with patch.object(loop, "resolve_precision", resolved):
        train(recipe, prepared, folder, command=[], device=device)


def learning(setup: Setup) -> Iterator[Result]:
    """200 updates in the last way of each precision with each optimiser: the loss is float32's of PyTorch within 2%."""
    prepared, updates = builtin(setup), 4 if setup.tiny else 200
    cases = [
        (name, optimizer) for name in ("float32", "tf32", "bfloat16", "float16") for optimizer in ("adamw", "muon")
    ]
    for precision, optimizer in own(setup, cases):
        if setup.device == "cpu" and precision in ("tf32", "float16"):
            continue

        def compute(precision: str = precision, optimizer: str = optimizer) -> Result:
            with TemporaryDirectory() as folder:
                losses = {}
                for name in ("float32", precision):
                    settings = {"precision": name, "optimizer": optimizer, "max_updates": updates}
                    settings["validate_every"] = updates
                    where = Path(folder) / name
                    if not where.exists():
                        recipe = small(training=settings)
                        train_in_one_way(recipe, prepared, where, setup.device, 0 if name == "float32" else -1)
                    rows = list(read_metrics(where / "metrics.jsonl"))
                    losses[name] = [row["loss"] for row in rows if row["kind"] == "train"]
                    losses[name] += [row["nll"] for row in rows if row["kind"] == "validation"]
            last, wanted = losses[precision][-1], losses["float32"][-1]
            learned = setup.tiny or losses[precision][-2] < 0.5 * losses[precision][0]
            return {"ok": bool(learned and abs(last / wanted - 1) < 0.02), "nll": last, "float32": wanted,
                    "losses": [round(loss, 4) for loss in losses[precision][::4]]}  # fmt: skip

        yield guarded(f"learning {precision} {optimizer}", compute)


GRADIENT_CASES: dict[str, dict[str, Any]] = {
    "post": {"model": {"norm": "post"}},
    "pre, untied, rotary": {"model": {"norm": "pre", "tie": "none", "positions": "none"},
                            "attention": {"options": {"positions": "rotary"}}},
    # dropout that drops nothing: the devices draw different numbers
    "r_drop": {"model": {"dropout": 1e-9}, "training": {"r_drop": 1.0, "label_smoothing": 0.1}},
    "reversible": {"model": {"reversible": True, "norm": "pre"}},
    "checkpointed": {"training": {"checkpoint_activations": True}},
    "rnn": {"model": {"architecture": "rnn", "heads": 1}, "attention": {"cross": "additive"}},
    "sparse": {"attention": {"encoder": "longformer", "decoder": "band", "cross": "full"}},
}  # fmt: skip


def gradients(setup: Setup) -> Iterator[Result]:
    """The gradient of one update on the device, and on the CPU in float32."""
    prepared = builtin(setup)
    recipes = {name: small(**groups) for name, groups in GRADIENT_CASES.items()}
    kinds = [*((name, "float32") for name in GRADIENT_CASES), ("post", "bfloat16")]
    cases = [
        (name, way)
        for name, precision in kinds
        for way in ways(recipes[name], precision, setup.device).values()
        if not way.graphs
    ]
    for name, way in own(setup, cases):

        def compute(name: str = name, way: Precision = way) -> Result:
            wanted = _gradients(recipes[name], prepared, "cpu", Precision("float32", torch.device("cpu")))
            found = _gradients(recipes[name], prepared, setup.device, way)
            keys = [key for key in wanted if not key.endswith("k_proj.bias")]  # zero but for rounding
            apart = {key: distance(found[key], wanted[key]) for key in keys}
            worst = max(apart, key=apart.__getitem__)
            limit = 1e-3 if way.name == "float32" else 0.1
            return {"ok": apart[worst] < limit, "worst": worst, "apart": apart[worst]}

        yield guarded(f"gradients {name} {way}", compute)


def _gradients(recipe: Recipe, prepared: Prepared, device: str, way: Precision) -> dict[str, Tensor]:
    model = model_of(recipe, prepared, device)
    with World(device) as world, fast_and_repeatable(world.device):
        updater = Updater(model, recipe, world, way)
        updater.run(work_of(prepared, range(8), range(8, 12)), 1, rate=0.0, total_updates=1)
    return {name: each.grad.cpu() for name, each in model.named_parameters() if each.grad is not None}


def resume(setup: Setup) -> Iterator[Result]:
    """A run that is stopped and resumed beside one that is not: equal with `deterministic`, near without."""
    prepared = builtin(setup)
    for exact in own(setup, [True, False]):

        def compute(exact: bool = exact) -> Result:
            def recipe(updates: int) -> Recipe:
                settings = {
                    "max_updates": updates,
                    "validate_every": 12,
                    "batch_tokens": 500,
                    "deterministic": exact,
                    "precision": "bfloat16",
                }
                return small(training=settings, model={"dropout": 0.1})

            with TemporaryDirectory() as name:
                straight, resumed = Path(name) / "straight", Path(name) / "resumed"
                for folder, updates in ((straight, 24), (resumed, 12), (resumed, 24)):
                    train_in_one_way(recipe(updates), prepared, folder, setup.device, 0 if exact else -1)
                apart = 0.0
                for file in ("model", "optimizer"):
                    one, two = (
                        verified_tensors(folder / "checkpoints" / "update-00000024", file)
                        for folder in (straight, resumed)
                    )
                    apart = max(apart, *(distance(one[key].float(), two[key].float()) for key in two))
            return {"ok": apart == 0.0 if exact or setup.device == "cpu" else apart < 0.5, "apart": apart}

        yield guarded(f"resume {'deterministic' if exact else 'default'}", compute)


def mechanism_recipes(setup: Setup) -> Iterator[tuple[str, Recipe]]:
    """A small recipe for each mechanism to check, in each role that the mechanism can play."""
    for name, mechanism in mechanisms().items():
        for role in sorted(mechanism.roles) if setup.includes(name) else ():
            yield f"{name} {role}", small(attention={role: name})


def _updated(setup: Setup, recipe: Recipe, way: Precision, *, deterministic: bool, count: int) -> list[int]:
    """Makes updates; returns the waits of the host in each."""
    prepared, waits = builtin(setup), list[int]()
    with (
        fixed_workspaces(deterministic),
        World(setup.device) as world,
        fast_and_repeatable(world.device, deterministic=deterministic),
    ):
        updater = Updater(model_of(recipe, prepared, setup.device), recipe, world, way)
        work = work_of(prepared, range(16))
        for number in range(1, count + 1):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if setup.device == "cuda":
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    updater.run(work, number, rate=1e-3, total_updates=count)
                finally:
                    if setup.device == "cuda":
                        torch.cuda.set_sync_debug_mode("default")
            waits.append(sum("synchroniz" in str(warning.message) for warning in caught))
        if updater.first_failed() is not None:
            raise ArithmeticError(f"loss or gradient is not finite at update {updater.first_failed()}")
    return waits


def strict(setup: Setup) -> Iterator[Result]:
    """One update of every mechanism with `deterministic`, which excludes Triton and graphs."""
    for name, recipe in own(setup, list(mechanism_recipes(setup))):

        def compute(recipe: Recipe = recipe) -> Result:
            way = Precision("bfloat16", torch.device(setup.device))
            _updated(setup, recipe, way, deterministic=True, count=1)
            return {"ok": True}

        yield guarded(f"strict {name}", compute)


def waits(setup: Setup) -> Iterator[Result]:
    """Updates of every mechanism in each way: the host does not wait for the device in the third one."""
    for name, recipe in own(setup, [*mechanism_recipes(setup), ("rnn", small(**GRADIENT_CASES["rnn"]))]):

        def compute(recipe: Recipe = recipe) -> Result:
            counted = {
                name: _updated(setup, recipe, way, deterministic=False, count=3)
                for name, way in ways(recipe, "bfloat16", setup.device).items()
            }
            return {"ok": not any(waits[-1] for waits in counted.values()), "waits": counted}

        yield guarded(f"waits {name}", compute)


def memory(setup: Setup) -> Iterator[Result]:
    """A batch that the memory does not hold is computed in halves, to the same gradient."""
    prepared = builtin(setup)
    recipe = small(model={"d_model": 512, "feed_forward": 2048})

    def compute() -> Result:
        found, said = [], list[str]()
        for short in (False, True):
            model = model_of(recipe, prepared, setup.device)
            with World(setup.device) as world, fast_and_repeatable(world.device):
                updater = Updater(model, recipe, world, Precision("float32", world.device), said.append)
                if setup.device == "cuda":
                    total = torch.cuda.get_device_properties(0).total_memory
                    torch.cuda.empty_cache()
                    limit = 0.6 * torch.cuda.max_memory_allocated() if short else total
                    torch.cuda.reset_peak_memory_stats()
                    torch.cuda.set_per_process_memory_fraction(limit / total)
                updater.run(work_of(prepared, range(8 if setup.tiny else 800)), 1, rate=0.0, total_updates=1)
            found.append({name: each.grad.cpu() for name, each in model.named_parameters() if each.grad is not None})
            del model, updater
        if setup.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
        apart = max(
            distance(found[1][key], value) for key, value in found[0].items() if not key.endswith("k_proj.bias")
        )
        return {"ok": apart < 1e-4 and (setup.device == "cpu" or bool(said)), "apart": apart, "said": said}

    yield guarded("memory halves", compute)
