"""A validation that three processes share is that of one: loss, hypotheses, BLEU; of few segments too."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.data.prepared import Prepared, open_prepared
from mtkit.model.build import build_model
from mtkit.recipe import Recipe, make_recipe
from mtkit.training import validation
from mtkit.training.interruption import Interruption
from mtkit.training.precision import Precision
from mtkit.training.train import train
from mtkit.training.world import World
from tests.processes import together
from tests.training.conftest import TINY


def found_together(recipe: Recipe, run: Path) -> dict[str, Any] | None:
    """What these processes find, on the first of them."""
    torch.manual_seed(1)
    prepared = open_prepared(recipe.data.folder)
    recipe = recipe.model_copy(update={"data": prepared.settings})
    sizes = {f"{side}_vocabulary": getattr(prepared.tokenizers, side).size for side in ("source", "target")}
    model = build_model(recipe, **sizes)
    kept: list[str] = []
    scores = validation._scores
    validation._scores = lambda hypotheses, *rest: kept.extend(hypotheses) or scores(hypotheses, *rest)  # type: ignore[func-returns-value]
    with World("cpu") as world, Interruption() as interruption:
        precision = Precision("float32", world.device)
        found = validation.validate(model, recipe, prepared, run, precision, interruption, world)
        assert (found is not None) == world.first
        model.eval()
        loss = validation.validation_loss(model, recipe, prepared, precision, world)
    return None if found is None else {"nll": found.nll, "loss": loss, "bleu": found.bleu, "hypotheses": kept}


@pytest.mark.parametrize(("segments", "method"), [(None, "greedy"), (2, "greedy"), (None, "sample")])
def test_three_processes_find_what_one_finds(
    segments: int | None, method: str, prepared: Prepared, tmp_path: Path
) -> None:
    training = TINY["training"] | {"max_updates": 1, "validate_segments": segments}
    settings = TINY | {"training": training, "data": {"folder": str(prepared.folder)}, "decoding": {"method": method}}
    recipe, run = make_recipe(settings), tmp_path / "run"
    train(recipe, prepared, run, command=["mtkit"], device="cpu")
    one, three = (together(count, found_together, recipe, run)[0] for count in (1, 3))
    assert one is not None
    assert three is not None
    assert len(one["hypotheses"]) == (segments or len(prepared.valid))
    assert len(set(one["hypotheses"])) > 1
    assert three["hypotheses"] == one["hypotheses"]
    assert three["bleu"] == one["bleu"]
    assert three["nll"] == pytest.approx(one["nll"], rel=1e-6)
    assert three["loss"] == three["nll"]
