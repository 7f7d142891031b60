"""A validation that three processes share is that of one: loss, hypotheses, BLEU; of few segments too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtkit.data.prepared import Prepared
from tests.training.conftest import TINY

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from mtkit.data.prepared import open_prepared
from mtkit.model.build import build_model
from mtkit.recipe import make_recipe
from mtkit.training import validation
from mtkit.training.distributed.world import World
from mtkit.training.limits import Interruption
from mtkit.training.optimization.optimizer import Precision

settings, run, out = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
recipe = make_recipe(settings)
prepared = open_prepared(recipe.data.folder)
recipe = recipe.model_copy(update={"data": prepared.settings})
sizes = {side: getattr(prepared.tokenizers, side).size for side in ("source", "target")}
torch.manual_seed(1)
model = build_model(recipe, source_vocabulary=sizes["source"], target_vocabulary=sizes["target"])
with World("cpu") as world, Interruption() as interruption:
    kept = []
    score = validation._score
    validation._score = lambda hypotheses, *rest: kept.extend(hypotheses) or score(hypotheses, *rest)
    found = validation.validate(model, recipe, prepared, run, Precision("float32", world.device), interruption, world)
    assert (found is not None) == world.first
    model.eval()
    loss = validation.validation_loss(model, recipe, prepared, Precision("float32", world.device), world)
    if found is not None:
        out.write_text(json.dumps({"nll": found.nll, "loss": loss, "bleu": found.bleu, "hypotheses": kept}))
"""


def shared(processes: int, settings: dict, run: Path, folder: Path) -> dict:  # type: ignore[type-arg]
    """What so many processes find together."""
    script, out = folder / "script.py", folder / f"{processes}.json"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*torchrun, str(script), json.dumps(settings), str(run), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(out.read_text())  # type: ignore[type-arg]
    return found


@pytest.mark.parametrize(("segments", "method"), [(None, "greedy"), (2, "greedy"), (None, "sample")])
def test_three_processes_find_what_one_finds(
    segments: int | None, method: str, prepared: Prepared, tmp_path: Path
) -> None:
    from mtkit.recipe import make_recipe
    from mtkit.training.loop import train

    training = TINY["training"] | {"max_updates": 1, "validate_segments": segments}
    settings = TINY | {"training": training, "data": {"folder": str(prepared.folder)}, "decoding": {"method": method}}
    run = tmp_path / "run"
    train(make_recipe(settings), prepared, run, command=["mtkit"], device="cpu")
    one, three = (shared(count, settings, run, tmp_path) for count in (1, 3))
    assert len(one["hypotheses"]) == (segments or len(prepared.valid))
    assert len(set(one["hypotheses"])) > 1
    assert three["hypotheses"] == one["hypotheses"]
    assert three["bleu"] == one["bleu"]
    assert three["nll"] == pytest.approx(one["nll"], rel=1e-6)
    assert three["loss"] == three["nll"]
