import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtkit.evaluation.scores import score_corpus
from mtkit.evaluation.systems import read_texts, run_sides
from mtkit.experiments.children import Children
from mtkit.experiments.compare import compare
from mtkit.experiments.folder import Folder
from mtkit.experiments.run import run_trial
from mtkit.experiments.study import Study
from mtkit.memory import peak_bytes
from mtkit.runs import Run, find_run
from mtkit.training.checkpoint import read_progress
from tests.experiments.conftest import Made, Opened

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
MACHINE = {"threads": 1, "shared": False, "hardware": "cpu", "device": "cpu"}


@pytest.fixture
def planned(opened: Opened) -> Callable[[Study], tuple[Folder, str]]:
    """The folder of a study, and the name of its first trial, which is written there."""

    def build(study: Study) -> tuple[Folder, str]:
        folder, plan, data = opened(study)
        trial = plan.due([])[0]
        folder.add(trial, data[None])
        return folder, trial.name

    return build


def measured(folder: Folder, name: str) -> dict[str, Any]:
    assert run_trial(folder, name, CPU, MACHINE) == 0
    found = folder.row(name)
    assert found is not None
    return found


def test_its_row_is_that_of_the_run_it_leaves(tiny: Made, planned: Any) -> None:
    settings = {"training": {"max_updates": 4, "validate_every": 2}}
    folder, name = planned(tiny("multi-query", settings=settings))
    found = measured(folder, name)
    run = find_run(folder.run(name))
    texts = read_texts(run_sides([run])["test"])
    for score in score_corpus(texts.hypotheses[0], texts.references, metrics=("BLEU", "chrF", "exact")):
        assert found["scores"]["test"][score.name] == {
            "value": score.value, "low": score.low, "high": score.high, "signature": score.signature,
        }  # fmt: skip
        summed = folder.statistics(name)[f"test/{score.name}"]
        assert len(summed) == 8
    assert (found["side"], found["family"]) == ("test", "heads")
    assert found["parameters"] == sum(each.numel() for each in run.load_model().parameters())
    progress = read_progress(run.checkpoint("last"))
    training = found["training"]
    assert (training["updates"], training["tokens"]) == (4, progress.tokens)
    assert training["precision"] == "float32"
    assert training["seconds"] == progress.training_seconds > 0
    assert training["tokens_per_second"] == progress.tokens / training["seconds"]
    assert found["peak_bytes"] > 50 * 2**20
    assert found["decoding"]["segments"] == 8
    assert found["minutes"] * 60 > training["seconds"]
    assert [point["update"] for point in found["curve"]] == [2, 4]
    assert 0 < found["curve"][0]["tokens"] < found["curve"][1]["tokens"] == progress.tokens
    assert 0 < found["curve"][0]["seconds"] < found["curve"][1]["seconds"] <= training["seconds"]
    assert found["valid"] in found["curve"]
    assert found["valid"]["update"] == int(run.checkpoint("best").name.rpartition("-")[2])
    assert found["flops_per_token"] > 0
    assert set(found["state_bytes"]) == {"100", "1000"}


def test_the_metrics_are_those_of_the_recipe(tiny: Made, planned: Any) -> None:
    folder, name = planned(tiny("full", settings={"scoring": {"metrics": ["TER"]}}))
    assert list(measured(folder, name)["scores"]["test"]) == ["TER"]


def test_the_sides_are_those_of_the_study(tiny: Made, planned: Any) -> None:
    folder, name = planned(tiny("full", sides=["valid", "test"]))
    found = measured(folder, name)
    assert list(found["scores"]) == ["valid", "test"]
    assert found["side"] == "valid"
    assert {key.partition("/")[0] for key in folder.statistics(name)} == {"valid", "test"}


def test_scores_in_words_that_are_not_told_apart_are_doubted(
    tiny: Made, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokenizer of BLEU is known to fit the target text, as Chinese under the name of a language with spaces."""
    monkeypatch.setattr("mtkit.evaluation.scores.NO_BLEU", 101)
    monkeypatch.setattr("mtkit.evaluation.scores.SOME_CHRF", -1)
    monkeypatch.setattr("mtkit.evaluation.scores.SHORT", 0)
    found = measured(*planned(tiny("full")))
    assert "the tokenizer 13a does not seem to fit the target text" in found["doubt"]


def test_data_that_has_changed_is_refused(tiny: Made, opened: Opened) -> None:
    folder, plan, _ = opened(tiny("full"))
    folder.add(plan.due([])[0], "other data")
    with pytest.raises(Exception, match="has changed since the comparison was started"):
        run_trial(folder, "full.seed-1", CPU, MACHINE)


def test_the_speed_of_training_leaves_validation_out(tiny: Made, planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtkit.training import loop

    validate = loop.validate

    def slow(*arguments: object) -> object:
        time.sleep(0.5)
        return validate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "validate", slow)
    folder, name = planned(tiny("full", settings={"training": {"max_updates": 4, "validate_every": 2}}))
    found = measured(folder, name)
    whole = read_progress(Run(folder.run(name)).checkpoint("last")).seconds
    assert whole - found["training"]["seconds"] > 0.5
    assert found["minutes"] * 60 > whole


def test_a_finished_training_is_only_translated_with_again(tiny: Made, planned: Any) -> None:
    folder, name = planned(tiny("full"))
    before = measured(folder, name)
    folder.forget(name)
    trained = (folder.run(name) / "metrics.jsonl").read_bytes()
    after = measured(folder, name)
    assert (folder.run(name) / "metrics.jsonl").read_bytes() == trained
    assert (after["scores"], after["training"]) == (before["scores"], before["training"])


def test_without_its_parent_it_saves_and_stops_and_the_next_goes_on(tiny: Made, opened: Opened) -> None:
    study = tiny("full", settings={"training": {"max_updates": 400, "validate_every": 400}})
    folder, plan, data = opened(study)
    folder.add(plan.due([])[0], data[None])
    name, log = "full.seed-1", folder.log("full.seed-1")
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "mtkit.experiments.run", str(folder.path), name],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    _wait_for(lambda: "update 3" in log.read_text(), worker)
    assert worker.stdin is not None
    worker.stdin.close()  # as when the parent is killed
    assert worker.wait(60) == 128 + signal.SIGTERM
    progress = read_progress(Run(folder.run(name)).checkpoint("last"))
    assert 0 < progress.update < 400
    assert folder.row(name) is None
    with Children(folder, "cpu", 1) as children:
        assert compare(folder, plan, data, children, show=lambda line: None, done=lambda name: None) is None
    found = folder.row(name)
    assert found is not None
    assert f"from update {progress.update}" in log.read_text()
    training = found["training"]
    assert training["updates"] == 400
    # the speed is over the seconds and tokens of both sessions
    assert progress.training_seconds < training["seconds"]
    assert training["tokens_per_second"] == training["tokens"] / training["seconds"]
    assert training["tokens"] > progress.tokens
    assert found["minutes"] * 60 > training["seconds"]


def test_peak_memory_is_in_bytes_and_only_grows() -> None:
    before = peak_bytes(CPU)
    assert 50 * 2**20 < before < 2**36
    block = torch.ones(2**26)  # 256 MiB
    assert peak_bytes(CPU) >= before
    assert peak_bytes(CPU) >= block.numel() * 4


def test_statistics_of_all_segments_give_the_score(tiny: Made, planned: Any) -> None:
    folder, name = planned(tiny("full"))
    found = measured(folder, name)
    exact = folder.statistics(name)["test/exact"]
    assert exact.shape == (8, 2)
    assert 100 * exact[:, 0].sum() / exact[:, 1].sum() == found["scores"]["test"]["exact"]["value"]
    assert np.isfinite(folder.statistics(name)["test/chrF"]).all()


def _wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
