import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtkit.evaluation.scores import score_corpus
from mtkit.evaluation.systems import read_texts, run_sides
from mtkit.experiments.compare import compare
from mtkit.experiments.folder import Folder
from mtkit.experiments.run import compare_one
from mtkit.memory import peak_bytes
from mtkit.recipe import Recipe
from mtkit.runs import Run, find_run
from mtkit.training.checkpoint import read_progress

Tiny = Callable[..., Recipe]
Opened = Callable[..., Folder]
ROOT = Path(__file__).parent.parent.parent


def test_its_result_is_that_of_the_run_it_leaves(tiny: Tiny, opened: Opened) -> None:
    folder = opened(tiny(), "multi-query")
    assert compare_one(folder, "multi-query") == 0
    found = folder.result("multi-query")
    assert found is not None
    run = find_run(folder.run("multi-query"))
    texts = read_texts(run_sides([run])["test"])
    bleu = score_corpus(texts.hypotheses[0], texts.references)[0]
    assert found["bleu"] == {"value": bleu.value, "low": bleu.low, "high": bleu.high, "signature": bleu.signature}
    assert found["side"] == "test"
    assert found["parameters"] == sum(each.numel() for each in run.load_model().parameters())
    progress = read_progress(run.checkpoint("last"))
    training = found["training"]
    assert (training["updates"], training["tokens"]) == (2, progress.tokens)
    assert training["precision"] == run.about.get("precision", "float32")
    assert training["seconds"] == progress.training_seconds > 0
    assert training["tokens_per_second"] == progress.tokens / training["seconds"]
    assert found["peak_bytes"] > 50 * 2**20
    assert found["decoding"]["segments"] == 8


def test_scores_in_words_that_are_not_told_apart_are_doubted(
    tiny: Tiny, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokenizer of BLEU is known to fit the target text, as Chinese under the name of a language with spaces."""
    monkeypatch.setattr("mtkit.evaluation.scores.NO_BLEU", 101)
    monkeypatch.setattr("mtkit.evaluation.scores.SOME_CHRF", -1)
    folder = opened(tiny(), "full")
    assert compare_one(folder, "full") == 0
    found = folder.result("full")
    assert found is not None
    assert "the tokenizer 13a does not seem to fit the target text" in found["doubt"]


def test_the_speed_of_training_leaves_validation_out(
    tiny: Tiny, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtkit.training import loop

    validate = loop.validate

    def slow(*arguments: object) -> object:
        time.sleep(0.5)
        return validate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "validate", slow)
    folder = opened(tiny(training={"max_updates": 4, "validate_every": 2}), "full")
    compare_one(folder, "full")
    whole = read_progress(Run(folder.run("full")).checkpoint("last")).seconds
    assert whole - (folder.result("full") or {})["training"]["seconds"] > 0.5


def test_a_finished_training_is_only_translated_with_again(tiny: Tiny, opened: Opened) -> None:
    folder = opened(tiny(), "full")
    compare_one(folder, "full")
    before = folder.result("full")
    folder.forget("full")
    trained = (folder.run("full") / "metrics.jsonl").read_bytes()
    compare_one(folder, "full")
    after = folder.result("full")
    assert before is not None
    assert after is not None
    assert (folder.run("full") / "metrics.jsonl").read_bytes() == trained
    assert (after["bleu"], after["training"]) == (before["bleu"], before["training"])


def test_without_its_parent_it_saves_and_stops_and_the_next_goes_on(tiny: Tiny, opened: Opened) -> None:
    folder = opened(tiny(training={"max_updates": 400, "validate_every": 400}), "full")
    log = folder.log("full")
    log.parent.mkdir()
    with log.open("ab") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "mtkit.experiments.run", str(folder.path), "full"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    _wait_for(lambda: "update 3" in log.read_text(), worker)
    assert worker.stdin is not None
    worker.stdin.close()  # as when the parent is killed
    assert worker.wait(60) == 128 + signal.SIGTERM
    progress = read_progress(Run(folder.run("full")).checkpoint("last"))
    assert 0 < progress.update < 400
    assert folder.result("full") is None
    assert compare(folder, ["full"], show=lambda line: None, done=lambda name: None) is None
    found = folder.result("full")
    assert found is not None
    assert f"from update {progress.update}" in log.read_text()
    training = found["training"]
    assert training["updates"] == 400
    # the speed is over the seconds and tokens of both sessions
    assert progress.training_seconds < training["seconds"]
    assert training["tokens_per_second"] == training["tokens"] / training["seconds"]
    assert training["tokens"] > progress.tokens


def test_peak_memory_is_in_bytes_and_only_grows() -> None:
    before = peak_bytes(torch.device("cpu"))
    assert 50 * 2**20 < before < 2**36
    block = torch.ones(2**26)  # 256 MiB
    assert peak_bytes(torch.device("cpu")) >= before
    assert peak_bytes(torch.device("cpu")) >= block.numel() * 4


def _wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
