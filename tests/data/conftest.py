"""Small text files and data prepared from them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.recipe.data import Corpus, DataSettings, Grammar, TokenizerSettings
from tests.text.conftest import trained  # noqa: F401  (a fixture of these tests too)

WritePair = Callable[[str, bytes, bytes], Corpus]


@pytest.fixture
def write_pair(tmp_path: Path) -> WritePair:
    """Writes two files of raw bytes and gives their pair."""

    def write(name: str, source: bytes, target: bytes) -> Corpus:
        paths = tmp_path / f"{name}.en", tmp_path / f"{name}.de"
        paths[0].write_bytes(source)
        paths[1].write_bytes(target)
        return Corpus(source=paths[0], target=paths[1])

    return write


@pytest.fixture(scope="session")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A small built-in corpus, prepared."""
    folder = tmp_path_factory.mktemp("builtin") / "data"
    grammar, tokenizer = Grammar(train=400, valid=30, test=20), TokenizerSettings(vocabulary=600)
    prepare(DataSettings(folder=folder, builtin=grammar, tokenizer=tokenizer))
    return open_prepared(folder)
