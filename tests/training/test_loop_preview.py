"""Previews: the first updates of a training, measured, and an estimate from them."""

import re
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from mtkit.data.prepared import Prepared
from mtkit.memory import in_words, machine_bytes
from mtkit.training import preview
from mtkit.training.preview import fitting_tokens
from mtkit.training.update import Updater
from tests.training.conftest import run, tiny


def previewed(folder: Path, prepared: Prepared, **training: Any) -> tuple[list[str], int]:
    said: list[str] = []
    outcome = run(tiny(training=training), prepared, folder / "run", preview=True, say=said.append)
    assert not (folder / "run" / "checkpoints").exists() or not any((folder / "run" / "checkpoints").iterdir())
    return said, outcome.progress.update


def test_the_estimate_is_updates_times_seconds(
    tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With updates of 50 ms, of which the slow first does not count."""
    monkeypatch.setattr(preview, "PREVIEW_SECONDS", 0.4)
    update = Updater.run

    def slow(self: Updater, work: Any, number: int, **rest: Any) -> None:
        update(self, work, number, **rest)
        sleep(2.0 if number == 1 else 0.05)

    monkeypatch.setattr(Updater, "run", slow)
    said, made = previewed(tmp_path, prepared, max_updates=60_000)
    assert 3 <= made < 60
    assert "parameters" in said[-3]
    speed, estimate = said[-2:]
    (seconds,) = map(float, re.findall(r"^([\d.e-]+) s per update", speed))
    assert 0.05 <= seconds < 1.0
    assert f"in {made - 1} updates; peak memory" in speed
    assert speed.endswith(f" of {in_words(machine_bytes())}")
    (minutes,) = (float(found.replace(",", "")) for found in re.findall(r": ([\d,.]+) minutes$", estimate))
    assert minutes == pytest.approx(60_000 * seconds / 60, rel=0.02)


def test_slow_updates_end_the_preview_after_the_first(
    tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "SLOW_SECONDS", 0.4)
    update = Updater.run

    def slow(self: Updater, work: Any, number: int, **rest: Any) -> None:
        update(self, work, number, **rest)
        sleep(0.5)

    monkeypatch.setattr(Updater, "run", slow)
    said, made = previewed(tmp_path, prepared, max_updates=600)
    assert made == 1
    (minutes,) = (float(found) for found in re.findall(r": ([\d.]+) minutes$", said[-1]))
    assert minutes >= 600 * 0.5 / 60


def test_limits_of_minutes_and_few_updates_hold(
    tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "PREVIEW_SECONDS", 0.0)
    said, made = previewed(tmp_path / "minutes", prepared, max_updates=10**9, max_minutes=7)
    assert made == 3
    assert said[-1].endswith(": 7.0 minutes")
    said, made = previewed(tmp_path / "one", prepared, max_updates=1)
    assert made == 1
    assert "in 1 updates" in said[-2]


def test_limits_of_tokens_are_estimated(tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "PREVIEW_SECONDS", 0.0)
    for updates in (None, 10**9):
        said, _ = previewed(tmp_path / str(updates), prepared, max_updates=updates, max_tokens=10**6)
        (speed,) = (float(found.replace(",", "")) for found in re.findall(r"([\d,.]+) target tokens/s", said[-2]))
        (minutes,) = (float(found.replace(",", "")) for found in re.findall(r": ([\d,.]+) minutes$", said[-1]))
        assert minutes == pytest.approx(10**6 / speed / 60, rel=0.5, abs=0.1)


def test_memory_that_does_not_suffice_is_an_error(
    tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Updater, "run", short)
    with pytest.raises(Exception, match="out of memory on cpu at update 1; halve --batch-tokens"):
        previewed(tmp_path, prepared)


def test_the_tokens_that_fit_grow_with_the_memory_that_weights_leave() -> None:
    assert fitting_tokens(1_000, held=10.0, peak=30.0, memory=100.0) == 4_000
    assert fitting_tokens(1_000, held=10.0, peak=90.0, memory=100.0) == 1_000
