"""Temperature sampling over corpora: shares by the formula written naively, and the rows of real epochs."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.recipe.data import DataSettings
from mtkit.training.data_loader import DataLoader, tempered
from mtkit.training.world import World
from tests.training.conftest import tiny


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 5.0, 1e9])
def test_shares_are_powers_of_the_sizes_and_the_epoch_is_as_long(temperature: float) -> None:
    weights, segments = [1.0, 2.0, 0.5, 1.0], [1000, 50, 400, 0]
    sizes = [1000.0, 100.0, 200.0, 0.0]
    powers = [size ** (1 / temperature) if size else 0 for size in sizes]
    rows = [weight * count for weight, count in zip(tempered(weights, segments, temperature), segments, strict=True)]
    assert rows == pytest.approx([1300 * power / sum(powers) for power in powers])


def test_the_least_temperature_takes_the_largest_corpus_and_one_corpus_keeps_its_weight() -> None:
    assert tempered([1.0, 1.0], [30, 20], 1e-30) == pytest.approx([50 / 30, 0])
    assert tempered([2.5], [7], 3.0) == pytest.approx([2.5])
    assert tempered([], [], 3.0) == []


@pytest.mark.parametrize("windows", [False, True])
def test_epochs_have_the_shares(tmp_path: Path, windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if windows:
        monkeypatch.setattr("mtkit.data.epochs.WINDOW", 60)
        monkeypatch.setattr("mtkit.data.epochs.BLOCK", 8)

    def corpus(name: str, count: int) -> dict[str, Path]:
        files = {"source": tmp_path / f"{name}.en", "target": tmp_path / f"{name}.de"}
        for side, path in files.items():
            path.write_text("".join(f"{name} {side} {number % 9}\n" for number in range(count)))
        return files

    corpora = [corpus("large", 810), corpus("small", 90)]
    prepare(DataSettings(folder=tmp_path / "data", train=corpora, valid=corpus("valid", 5)))
    recipe = tiny(training={"accumulate": 1, "batch_tokens": 200, "corpus_temperature": 2.0})
    prepared = open_prepared(tmp_path / "data")
    loader = DataLoader(recipe, prepared, 1024, World("cpu"))
    updates = islice(loader.updates(0, 0), loader.updates_per_epoch)
    rows = np.concatenate([rows for update in updates for rows in update.rows])
    assert prepared.train.corpora is not None
    counts = Counter(prepared.train.corpora[:][rows].tolist())
    # the square roots of 810 and 90 are as 3 to 1
    assert counts[0] == pytest.approx(675, abs=20 if windows else 1)
    assert counts[1] == pytest.approx(225, abs=20 if windows else 1)
