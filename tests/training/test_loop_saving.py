"""Checkpoints that are written during the validation, as on a GPU."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError
from mtkit.training import loop
from mtkit.training.checkpoint import Checkpoints
from mtkit.training.validation import Validation
from tests.training.conftest import run, tiny
from tests.training.test_loop import assert_same_numbers

SAVE, VALIDATE = Checkpoints.save, loop.validate


@pytest.fixture(autouse=True)
def _written_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Training, "_writes_meanwhile", True)


def test_the_checkpoint_is_written_while_the_average_is_validated(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    run(tiny(), prepared, tmp_path / "before")
    validating = Event()

    def save(*given: Any) -> Path:
        assert validating.wait(60)
        return SAVE(*given)

    def validate(*given: Any) -> Validation | None:
        validating.set()
        return VALIDATE(*given)

    monkeypatch.setattr(loop.Training, "_writes_meanwhile", True)
    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr(loop, "validate", validate)
    run(tiny(), prepared, tmp_path / "during")
    assert_same_numbers(tmp_path / "before", tmp_path / "during")


def test_an_error_of_the_validation_loses_no_checkpoint(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError

    monkeypatch.setattr(loop, "validate", fail)
    with pytest.raises(KeyError):
        run(tiny(), prepared, tmp_path)
    monkeypatch.setattr(loop, "validate", VALIDATE)
    assert run(tiny(), prepared, tmp_path).trained == 16


def test_an_error_of_the_checkpoint_ends_the_training(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Path:
        raise MtkitError("no space left")

    monkeypatch.setattr(Checkpoints, "save", fail)
    with pytest.raises(MtkitError, match="no space left"):
        run(tiny(), prepared, tmp_path)
