"""What every test starts from: one thread, the same random numbers whatever ran before it; and the order of all."""

import gc
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from mtkit.data.prepared import Prepared

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread_and_the_same_random_numbers() -> Iterator[None]:
    """A command that runs inside of a test leaves its `--threads` behind; the sums of two threads are other sums."""
    random.seed(1)
    np.random.seed(1)
    # torch.manual_seed formats the call stack for each kind of accelerator, which takes half a millisecond
    torch.default_generator.manual_seed(1)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(1)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


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


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that lets Triton's interpreter run the kernels of a module, on the CPU; skips without Triton."""

    def interpret(name: str) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # before the first import of Triton
        pytest.importorskip("triton")
        if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            pytest.skip("Triton's interpreter reads numbers from arrays as NumPy 2.4 no longer allows")
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        package, _, last = name.rpartition(".")
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(importlib.import_module(package), last, module, raising=False)

    return interpret


def pytest_collection() -> None:
    """The garbage collector would visit all tests again and again while their number grows."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported and collected lives until the end: the garbage collector does not visit it again."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first and the contract's last, so that processes that take a file at a time end together."""
    folders = {"flows": 0, "contract": 2}
    items.sort(key=lambda item: folders.get(item.path.parent.name, 1))
