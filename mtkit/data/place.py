"""What decides whether data must be prepared anew: its settings, and the content of what it is made from.

The folder that prepared data goes to: it is replaced whole, so it must hold nothing else.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtkit.data.builtin.corpus import corpus as builtin_corpus
from mtkit.data.prepared import read_record
from mtkit.data.vocabulary import vocabulary_of
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.terminal import ProgressBar
from mtkit.text.corpora import EMPTY_LINES, Facts, measure_corpus

Corpora = dict[str, Sequence[Corpus]]
"""The corpora of each side."""


def measured(sides: Corpora, progress: ProgressBar) -> dict[str, list[Facts]]:
    """The facts of all corpora. Raises: DataError where one cannot be read to the end, or is empty."""
    return {side: [measure_corpus(corpus, progress) for corpus in corpora] for side, corpora in sides.items()}


def identified(
    settings: DataSettings, facts: Mapping[str, Sequence[Facts]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What was read, by the facts of each side's corpora, and what decides whether data must be prepared anew."""
    inputs = _inputs(settings, facts)
    return inputs, {
        "settings": prepared_by(settings),
        "inputs": {name: each["sha256"] for name, each in inputs.items()},
    }


def _inputs(settings: DataSettings, facts: Mapping[str, Sequence[Facts]]) -> dict[str, dict[str, Any]]:
    """What identifies each input by its content, with where it lies."""
    borrowed = settings.tokenizer_from
    tokenizer = {} if borrowed is None else {"the tokenizer": {"sha256": vocabulary_of(borrowed / "tokenizer")}}
    if not settings.train:
        # its held-out sides stand for the whole corpus: they change when the grammar or a seed does
        drawn = builtin_corpus(settings.builtin)
        texts = (f"{each.source}\n{each.target}\n" for name in ("valid", "test") for each in drawn[name]())
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        return {"built-in corpus": {"sha256": digest}, **tokenizer}
    named = (pair for side, each in facts.items() for pair in zip(_names(side, each), each, strict=True))
    return {**{name: asdict(each) for name, each in named}, **tokenizer}


def prepared_by(settings: DataSettings) -> dict[str, Any]:
    """The settings that decide what is prepared: text counts by content, so not by where it lies."""
    unused = {"folder", "train", "valid", "test", "tokenizer_from"} | ({"builtin"} if settings.train else set())
    sides = {"train": settings.train, "valid": settings.valid, **settings.test}
    corpora = {
        name: {
            "direction": settings.direction_of(corpus),
            "weight": corpus.weight,
            "documents": corpus.documents is not None,
        }
        for side, each in sides.items()
        for name, corpus in zip(_names(side, each), each, strict=True)
    }
    dumped = settings.model_dump(mode="json", exclude=unused)
    del dumped["cleaning"]["misaligned"]  # says whether, not what
    return {**dumped, "corpora": corpora}


def _names(side: str, corpora: Sequence[object]) -> list[str]:
    """What the corpora of a side are called in prepared.json."""
    return [side] if len(corpora) == 1 else [f"{side} {number}" for number in range(1, len(corpora) + 1)]


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
