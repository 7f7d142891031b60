"""A model split over processes: each keeps its part, the run on disk is the same, and it goes on without the split."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mtkit.attention import mechanisms
from mtkit.data.batches import Batch, blank_batch
from mtkit.data.prepared import Prepared
from mtkit.errors import RecipeError
from mtkit.model.build import build_model
from mtkit.recipe import make_recipe, merged
from mtkit.text.tokenizer import BOS
from mtkit.training.checkpoint import verified_tensors
from mtkit.training.data_loader import UpdateBatches
from mtkit.training.precision import Precision
from mtkit.training.train import train
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.processes import together
from tests.training.conftest import TINY
from tests.training.optimization.test_gradient_reduction import trained


def test_a_split_run_goes_on_in_one_process(prepared: Prepared, tmp_path: Path) -> None:
    training = TINY["training"] | {"max_updates": 6, "ema": 0.9, "shard": True}
    given = TINY | {"training": training, "model": TINY["model"] | {"dropout": 0.0}}
    given |= {"data": {"folder": str(prepared.folder)}}
    resumed, whole = tmp_path / "resumed", tmp_path / "whole"
    together(2, trained, make_recipe(given), resumed)
    further = make_recipe(merged(given, {"training": {"max_updates": 12}}))
    outcome = train(further, prepared, resumed, command=["mtkit"], device="cpu")
    assert outcome.trained == 6
    train(further, prepared, whole, command=["mtkit"], device="cpu")
    for name in ("model", "ema", "optimizer"):
        found, wanted = (verified_tensors(each / "checkpoints" / "update-00000012", name) for each in (resumed, whole))
        assert found.keys() == wanted.keys()
        for key in [each for each in wanted if not each.endswith("k_proj.bias")]:
            torch.testing.assert_close(found[key], wanted[key], rtol=0.0, atol=1e-5, msg=f"{name}/{key}")


SMALL = {"d_model": 16, "heads": 2, "feed_forward": 32, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.0}


def batch(seed: int, rows: int, source: int, target: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    pieces, gold = (torch.randint(8, 60, (rows, width), generator=draw) for width in (source, target))
    shifted = torch.cat([torch.full((rows, 1), BOS), gold[:, :-1]], 1)
    valid, gold_valid = torch.ones_like(pieces).bool(), torch.ones_like(gold).bool()
    return Batch(pieces, valid, shifted, gold, gold_valid, rows * target, np.arange(rows))


def gradients(world: World, given: dict[str, Any], **training: Any) -> list[dict[str, Tensor]]:
    """Of three updates; in the second, one process has two batches and the other none."""
    recipe = make_recipe({**given, "training": {"clip_norm": 0.0, **training}})
    model = build_model(recipe, source_vocabulary=64, target_vocabulary=64).train()
    updater, found = Updater(model, recipe, world, Precision("float32", world.device)), []
    for number in (1, 2, 3):
        mine = [batch(10 * number + world.rank, 3, 9, 7)]
        if number == 2:
            mine = [*mine, batch(25, 2, 12, 5)] if world.first else []
        result = updater._step(mine, 42 if number != 2 else 31, number, 0.0)
        assert result is not None
        of = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        of = {name: each.full_tensor() if isinstance(each, DTensor) else each.clone() for name, each in of.items()}
        found.append({**of, "totals": result.totals})
        updater.optimizer.zero_grad(set_to_none=True)
    return found


def gradients_are_those_of_whole_weights(names: list[str]) -> None:
    with World("cpu") as world:
        for name in names:
            roles = mechanisms()[name].roles if name in mechanisms() else ()
            model = {**SMALL, "max_length": 64} | ({} if roles else {"architecture": name, "decoder_layers": 1})
            given = {"model": model, "attention": {role: name for role in roles}}
            expected = gradients(world, given)
            for checkpointed in (False, True) if roles else (False,):
                found = gradients(world, given, shard=True, checkpoint_activations=checkpointed)
                for whole, split in zip(expected, found, strict=True):
                    largest = max(float(each.norm()) for key, each in whole.items() if key != "totals")
                    for key in whole.keys() | split.keys():
                        apart = split[key] - whole.get(key, torch.zeros(()))
                        error = float(apart.norm()) / (1.0 if key == "totals" else largest)
                        assert error < 1e-5, (name, key, checkpointed, error)


@pytest.mark.parametrize(
    "names",
    [
        # what layers hand on beside the tokens: losses, carries, choices; statistics; parameters that several share
        ["disagreement", "guided", "realformer", "evolving", "lazy", "routing", "luna", "rnn", "ssd"],
        pytest.param([*mechanisms()], id="all", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_split_weights_are_those_of_whole_ones(names: list[str]) -> None:
    together(2, gradients_are_those_of_whole_weights, names)


def parts_are_kept() -> None:
    recipe = make_recipe(
        {
            "model": {"d_model": 32, "heads": 2, "feed_forward": 64, "encoder_layers": 2, "decoder_layers": 2},
            "training": {"shard": True, "ema": 0.9},
        }
    )
    model = build_model(recipe, source_vocabulary=300, target_vocabulary=300)
    total = sum(each.numel() for each in model.parameters())
    with World("cpu") as world:
        updater = Updater(model, recipe, world, Precision("float32", world.device))
        assert updater.average is not None
        average = updater.average.weights.values()
        blank = blank_batch(several_directions=False)
        updater.run(UpdateBatches([blank], world.size, [], 0, 0), 1, rate=1e-3, total_updates=10)

        def kept() -> float:
            parts = [*model.parameters(), *average, *(each.grad for each in model.parameters())]
            parts += [state[key] for state in updater.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            held = [each.to_local().untyped_storage() for each in parts if each is not None]  # type: ignore[attr-defined]
            return sum({each.data_ptr(): each.nbytes() for each in held}.values()) / 4

        # weights, their average, gradients and two moments; what does not divide evenly is filled up
        assert 5 * total / world.size <= kept() < 5.1 * total / world.size
        with updater.validation_weights():
            assert sum(each.numel() for each in model.parameters() if type(each) is torch.nn.Parameter) == total
        assert 4 * total / world.size <= kept() < 4.1 * total / world.size  # the gradients are freed


def test_each_process_keeps_its_part() -> None:
    together(2, parts_are_kept)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": {"reversible": True}}, "training.shard does not support model.reversible"),
        ({"training": {"lora": {}, "init_from": "a"}}, "training.shard does not support training.lora"),
    ],
)
def test_what_cannot_be_split_is_refused(given: dict[str, dict[str, object]], message: str) -> None:
    training = {"shard": True, **given.get("training", {})}
    with pytest.raises(RecipeError, match=message):
        make_recipe({**given, "training": training})
