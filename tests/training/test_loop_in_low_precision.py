"""Training in a low precision reads the current weights in every pass, whatever autocast is open around it."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from mtkit.data.batches import make_batch
from mtkit.data.prepared import Prepared
from mtkit.model.build import build_model
from mtkit.recipe import make_recipe, merged
from mtkit.runs import Run
from mtkit.training.checkpoint import verified_tensors
from mtkit.training.data_loader import UpdateBatches, count_tokens
from mtkit.training.metrics import read_metrics
from mtkit.training.objective import LOSS
from mtkit.training.precision import Precision, fast_and_repeatable
from mtkit.training.update import Updater
from mtkit.training.validation import validation_loss
from mtkit.training.world import World
from tests.processes import together
from tests.training.conftest import TINY, run, tiny
from tests.training.optimization.test_gradient_reduction import trained

CPU = torch.device("cpu")


class AutocastOnly(Precision):
    """Casts weights by autocast, as on a GPU, in place of copies of the weights (`LowWeights`)."""

    lowers_weights = False


def losses(prepared: Prepared, precision: Precision, optimizer: str) -> list[float]:
    """Mean training loss of five intervals of 12 updates on four segments."""
    size = prepared.tokenizers.target.size
    training = {"peak_rate": 3e-3, "optimizer": optimizer, "ema": 0.0}
    recipe = tiny(model={"dropout": 0.0, "d_model": 32}, training=training)
    torch.manual_seed(3)
    model = build_model(recipe, source_vocabulary=size, target_vocabulary=size).train()
    updater, rows = Updater(model, recipe, World("cpu"), precision), np.arange(4)
    tokens = count_tokens(prepared.train, [rows])
    work = UpdateBatches([make_batch(prepared.train, rows)], tokens, [rows], 0, 1)
    means = []
    for number in range(1, 61):
        updater.run(work, number, rate=6e-3, total_updates=60)
        if number % 12 == 0:
            means.append(updater.read()[LOSS] / (12 * tokens))
    return means


@pytest.mark.parametrize("callers", [False, True], ids=["alone", "inside-autocast"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_by_autocast_learns_as_float32(prepared: Prepared, optimizer: str, callers: bool) -> None:
    with fast_and_repeatable(CPU):
        expected = losses(prepared, Precision("float32", CPU), optimizer)
    assert expected[-1] < 0.5 * expected[0]
    with torch.autocast("cpu", torch.bfloat16) if callers else nullcontext(), fast_and_repeatable(CPU):
        actual = losses(prepared, AutocastOnly("bfloat16", CPU), optimizer)
    assert actual == pytest.approx(expected, rel=0.05)


def validation_losses(folder: Path) -> dict[int, float]:
    """Validation loss by update, as the run in the folder reports it."""
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["update"]: row["nll"] for row in rows if row["kind"] == "validation"}


def test_a_run_in_float16_by_choice_can_be_read(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU without bfloat16."""
    monkeypatch.setattr("mtkit.training.precision.best_precision", lambda device: "float16")
    choices = [Precision("float16", CPU)]
    monkeypatch.setattr("mtkit.training.precision_choice.update_precisions", lambda setting, device, graphs: choices)
    run(tiny(training={"precision": "auto", "max_updates": 2}), prepared, tmp_path)
    assert Run(tmp_path).about["precision"] == "float16"


def test_the_validation_loss_of_a_run_is_the_loss_of_its_checkpoint(prepared: Prepared, tmp_path: Path) -> None:
    recipe = tiny(training={"precision": "bfloat16", "ema": 0.0, "keep_last": 3})
    run(recipe, prepared, tmp_path)
    reported = validation_losses(tmp_path)
    assert list(reported) == [8, 16, 24]
    size = prepared.tokenizers.target.size
    for update, loss in reported.items():
        model = build_model(recipe, source_vocabulary=size, target_vocabulary=size).eval()
        model.load_state_dict(verified_tensors(tmp_path / "checkpoints" / f"update-{update:08}", "model"))
        assert validation_loss(model, recipe, prepared, Precision("bfloat16", CPU), World("cpu")) == pytest.approx(
            loss, rel=1e-6
        )


def test_a_split_model_in_bfloat16_learns_as_one_process(prepared: Prepared, tmp_path: Path) -> None:
    training = {"precision": "bfloat16", "ema": 0.0, "shard": True, "max_updates": 48, "validate_every": 24}
    groups = {"training": training, "model": {"dropout": 0.0}, "data": {"folder": str(prepared.folder)}}
    recipe = make_recipe(merged(TINY, groups))
    together(2, trained, recipe, tmp_path / "two")
    trained(recipe, tmp_path / "one")
    assert validation_losses(tmp_path / "two") == pytest.approx(validation_losses(tmp_path / "one"), rel=0.005)
