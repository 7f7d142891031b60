"""Trainings whose loss stays finite, and far above the loss of a uniform guess."""

import json
from pathlib import Path

import pytest

from mtkit.data.prepared import Prepared
from mtkit.errors import RunError
from mtkit.training.metrics import Metrics
from mtkit.training.optimization.divergence import Divergence
from tests.training.conftest import run, tiny


def test_a_diverged_training_stops_and_keeps_the_last_good_checkpoint(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Divergence, "UPDATES", 7)
    monkeypatch.setattr(Metrics, "draw", lambda self: None)  # it is slow
    often = {"validate_every": 10, "validate_segments": 1, "keep_last": 1, "log_every": 50}
    fast = {"peak_rate": 3.0, "max_updates": 99, "warmup_updates": 50}
    recipe = tiny(training=fast | often, decoding={"max_pieces": 3})
    with pytest.raises(RunError) as error:
        run(recipe, prepared, tmp_path)
    told = str(error.value)
    since = int(told.removeprefix("training has diverged: from update ").partition(" ")[0])
    good = tmp_path / "checkpoints" / f"update-{(since - 1) // 10 * 10:08d}"
    assert f"the last good checkpoint is {good}; train with a lower --peak-rate" in told
    assert json.loads((good / "state.json").read_text())["diverging"] == 0
    last = max((tmp_path / "checkpoints").glob("update-*"))
    assert json.loads((last / "state.json").read_text())["diverging"] > 0, "checkpoints went on meanwhile"
    with pytest.raises(RunError) as again:
        run(recipe, prepared, tmp_path)
    assert str(again.value) == told
