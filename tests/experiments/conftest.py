from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.experiments.entries import entries
from mtkit.experiments.folder import Folder
from mtkit.recipe import Recipe, make_recipe, merged
from mtkit.recipe.data import DataSettings


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred segments of the built-in corpus."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    given = {"folder": folder, "builtin": {"train": 200, "valid": 8, "test": 8}, "tokenizer": {"vocabulary": 400}}
    prepare(DataSettings.model_validate(given))
    return folder


@pytest.fixture
def prepared(prepared_folder: Path) -> Prepared:
    return open_prepared(prepared_folder)


@pytest.fixture
def tiny(prepared_folder: Path) -> Callable[..., Recipe]:
    """A recipe that trains in a moment, with these groups laid over it."""
    base: dict[str, Any] = {
        "data": {"folder": str(prepared_folder)},
        "model": {"d_model": 32, "heads": 2, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1},
        "training": {"batch_tokens": 200, "max_updates": 2, "validate_segments": 2, "log_every": 1},
        "decoding": {"method": "greedy"},
    }
    return lambda **groups: make_recipe(merged(base, groups))


@pytest.fixture
def opened(tmp_path: Path, prepared: Prepared) -> Callable[..., Folder]:
    """A comparison's folder for these mechanisms under this recipe, as the command opens it."""

    def build(recipe: Recipe, *names: str) -> Folder:
        folder = Folder(tmp_path / "out")
        folder.open(entries(recipe, names), prepared, device="cpu", threads=1)
        return folder

    return build
