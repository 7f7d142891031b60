"""What every test starts from: one thread, the same random numbers whatever ran before it; and the order of all."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from mtkit.data.prepared import Prepared

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A command that runs inside of a test leaves its `--threads` behind; the sums of two threads are other sums."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred segments of the built-in corpus, prepared."""
    from mtkit.data.prepare import prepare
    from mtkit.recipe.data import DataSettings

    folder = tmp_path_factory.mktemp("data") / "prepared"
    given = {"folder": folder, "builtin": {"train": 200, "valid": 8, "test": 8}, "tokenizer": {"vocabulary": 400}}
    prepare(DataSettings.model_validate(given))
    return folder


@pytest.fixture
def prepared(prepared_folder: Path) -> "Prepared":
    from mtkit.data.prepared import open_prepared

    return open_prepared(prepared_folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first and the contract's last, so that processes that take a file at a time end together."""
    folders = {"flows": 0, "contract": 2}
    items.sort(key=lambda item: folders.get(item.path.parent.name, 1))
