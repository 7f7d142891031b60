"""The folder that prepared data goes to: it is replaced whole, so it must hold nothing else."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mtkit.data.prepared.identity import Corpora
from mtkit.data.prepared.record import read_record
from mtkit.data.readers import EMPTY_LINES
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus


def check_place(folder: Path, sides: Corpora, borrowed: Path | None) -> None:
    """The folder is replaced whole, so it must be free or hold prepared data, and nothing that it is made from.

    Raises: DataError where it is not so; `borrowed`: the data that tokenizers are taken over from.
    """
    place = Path(os.path.realpath(folder))
    if folder.exists() and not (folder / "prepared.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not prepared data; give another folder with --data")
    if place.is_symlink():
        raise DataError(f"{folder} is a broken link; give another folder with --data")
    if Path.cwd().is_relative_to(place):
        raise DataError(f"{folder} is the current folder; give another one with --data, e.g. mtkit-data")
    read = [path for corpora in sides.values() for corpus in corpora for path in _paths(corpus)]
    for path in read if borrowed is None else [*read, borrowed / "tokenizer"]:
        if Path(os.path.realpath(path)).is_relative_to(place):
            raise DataError(f"{path} lies in {folder}, which is to be written; give another folder with --data")


def check_contents(folder: Path, sides: Iterable[str]) -> None:
    """Raises: DataError where the folder holds what `prepare` did not write, by its record or these sides' names."""
    with suppress(DataError):  # there is none, or a damaged one
        sides = [*sides, *read_record(folder)["sides"]]
    names = {"prepared.json", *(f"tokenizer/{name}.model" for name in ("joint", "source", "target", "folding"))}
    names |= {f"{name}.arrow" for name in ("train", "valid", "test", *sides)}
    names |= {f"text/{name}.{language}" for name in ("train", "valid", "test") for language in ("en", "de")}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if others := sorted(found - names):
        more = f" and {len(others) - 1:,} other files" if len(others) > 1 else ""
        raise DataError(
            f"{folder} holds {others[0]}{more}, which `mtkit prepare` did not write and would delete; move it away, or "
            "give another folder with --data"
        )


def _paths(corpus: Corpus) -> list[Path]:
    """The files and folders that a corpus is read from, as far as they are on this machine."""
    if corpus.file is not None:
        return [corpus.file]
    if corpus.dataset is not None:
        return [Path(corpus.dataset)]
    documents = None if corpus.documents == EMPTY_LINES else corpus.documents
    return [Path(str(path)) for path in (corpus.source, corpus.target, documents) if path is not None]
