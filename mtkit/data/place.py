"""The folder of prepared data: what decides whether it must be written again, and whether it may be replaced."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtkit.data.builtin.registry import builtin_sides
from mtkit.data.record import read_record
from mtkit.data.resolve import with_task_defaults
from mtkit.data.vocabulary import vocabulary_of
from mtkit.errors import DataError
from mtkit.recipe import differences
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.storage.files import file_above
from mtkit.text.corpora import Facts, paths_of

Corpora = dict[str, Sequence[Corpus]]
"""The corpora of each side."""

CONTRASTIVE = "contrastive.jsonl"
"""File of the test sides' contrastive pairs, in the folder of prepared data."""


def corpora_of(settings: DataSettings) -> Corpora:
    """Return the corpora of each side; none for the built-in corpus."""
    if settings.train:
        for corpus in settings.train:
            if corpus.translated_by is not None:
                raise DataError(
                    f"{corpus.source or corpus.target} is not translated by {corpus.translated_by} yet; call "
                    "mtkit.decoding.translated_text.with_translations(settings) first"
                )
        return {"train": settings.train, "valid": settings.valid, **settings.test}
    if settings.task is None and (settings.source_language, settings.target_language) != ("en", "de"):
        raise DataError(
            f"the built-in corpus translates en to de, not {settings.source_language} to {settings.target_language}; "
            f"give your own text with --train and --valid"
        )
    return {}


def identify(
    settings: DataSettings, facts: Mapping[str, Sequence[Facts]]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the inputs, from the facts of each side's corpora, and the data's identity.

    Data with another identity must be prepared again.
    """
    inputs = _describe_inputs(settings, facts)
    hashes = {name: about["sha256"] for name, about in inputs.items()}
    return inputs, {"settings": prepared_by(settings), "inputs": hashes}


def _describe_inputs(settings: DataSettings, facts: Mapping[str, Sequence[Facts]]) -> dict[str, dict[str, Any]]:
    """Return the content hash of each input, with its path and counts."""
    folder = settings.tokenizer_from
    tokenizer = {} if folder is None else {"the tokenizer": {"sha256": vocabulary_of(folder / "tokenizer")}}
    if not settings.train:
        # the held-out sides represent the corpus: they change when the grammar, the generator or a seed does
        drawn = [side for name, side in builtin_sides(settings).items() if name != "train"]
        texts = (f"{pair.source}\n{pair.target}\n" for side in drawn for pair in side.draw())
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        name = "built-in corpus" if settings.task is None else "task"
        return {name: {"sha256": digest}, **tokenizer}
    named = (pair for side, corpora in facts.items() for pair in zip(_names(side, corpora), corpora, strict=True))
    return {**{name: asdict(corpus) for name, corpus in named}, **tokenizer}


def prepared_by(settings: DataSettings) -> dict[str, Any]:
    """Return the settings that decide what is prepared, without paths: text is compared by content."""
    unused = {"folder", "train", "valid", "test", "tokenizer_from"}
    unused |= {"builtin"} if settings.train or settings.task is not None else set()
    unused |= {"task"} if settings.task is None else set()
    sides = {"train": settings.train, "valid": settings.valid, **settings.test}
    corpora = {
        name: {
            "direction": settings.direction_of(corpus),
            "weight": corpus.weight,
            "documents": corpus.documents is not None,
        }
        for side, members in sides.items()
        for name, corpus in zip(_names(side, members), members, strict=True)
    }
    dumped = settings.model_dump(mode="json", exclude=unused)
    del dumped["cleaning"]["misaligned"]  # decides whether data is prepared, not its content
    if dumped["documents"] and not dumped["documents"]["whole"]:
        del dumped["documents"]["whole"]  # data of earlier versions has no such setting
    return {**dumped, "corpora": corpora}


def changed_settings(prepared: DataSettings, wanted: DataSettings) -> list[str]:
    """List the data settings of a recipe that differ from the settings of prepared data."""
    detected = {"source_language", "target_language"} - wanted.model_fields_set  # set by prepare from the text
    wanted = with_task_defaults(wanted.model_copy(update={name: getattr(prepared, name) for name in detected}))
    keys = {*wanted.model_fields_set, *(("corpora",) if "train" in wanted.model_fields_set else ())}
    of_data, of_recipe = (
        {key: value for key, value in prepared_by(settings).items() if key in keys} for settings in (prepared, wanted)
    )
    return differences(of_data, of_recipe)


def join_changes(changes: Sequence[str]) -> str:
    """Join differences for a message; fingerprints of inputs and groups of settings are only named."""
    lines = []
    for change in changes:
        name, _, values = change.partition(": ")
        if name.startswith("inputs."):
            lines.append(f"{name.removeprefix('inputs.')}: other content")
        else:
            lines.append(f"{name.removeprefix('settings.')}: {'other settings' if '{' in values else values}")
    return "; ".join(lines)


def _names(side: str, corpora: Sequence[object]) -> list[str]:
    """Return the names of a side's corpora in prepared.json."""
    return [side] if len(corpora) == 1 else [f"{side} {number}" for number in range(1, len(corpora) + 1)]


def check_place(folder: Path, sides: Corpora, tokenizer_from: Path | None) -> None:
    """Check that the folder, which is replaced, is free or prepared data, and holds none of its own inputs.

    Raises: DataError if not.
    """
    place = Path(os.path.realpath(folder))
    if folder.exists() and not (folder / "prepared.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not prepared data; give another folder with --data")
    if (file := file_above(folder)) is not None:
        raise DataError(f"{folder}: {file} is a file, not a folder; give another folder")
    if place.is_symlink():
        raise DataError(f"{folder} is a broken link; give another folder with --data")
    if Path.cwd().is_relative_to(place):
        raise DataError(f"{folder} is the current folder; give another one with --data, e.g. mtkit-data")
    inputs = [path for corpora in sides.values() for corpus in corpora for path in _paths(corpus)]
    for path in inputs if tokenizer_from is None else [*inputs, tokenizer_from / "tokenizer"]:
        if Path(os.path.realpath(path)).is_relative_to(place):
            raise DataError(f"{path} lies in {folder}, which is to be written; give another folder with --data")


def check_contents(folder: Path, sides: Iterable[str]) -> None:
    """Raises: DataError if the folder holds a file that `prepare` did not write, by its record or these `sides`."""
    ends: list[str] = []
    with suppress(DataError):  # no record, or a damaged one
        record = read_record(folder)
        sides = [*sides, *record["sides"]]
        ends = [str(record["settings"].get(language)) for language in ("source_language", "target_language")]
    names = {"prepared.json", CONTRASTIVE}
    names |= {f"tokenizer/{name}.model" for name in ("joint", "source", "target", "folding")}
    names |= {f"{name}.arrow" for name in ("train", "valid", "test", *sides)}
    names |= {f"text/{name}.{end}" for name in ("train", "valid", "test", *sides) for end in ("en", "de", "ids", *ends)}
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if others := sorted(files - names):
        more = f" and {len(others) - 1:,} other files" if len(others) > 1 else ""
        raise DataError(
            f"{folder} holds {others[0]}{more}, which `mtkit prepare` did not write and would delete; move it away, or "
            "give another folder with --data"
        )


def _paths(corpus: Corpus) -> list[Path]:
    """Return the files and folders of a corpus, as far as they are on this machine."""
    if corpus.file is not None:
        return [corpus.file]
    if corpus.dataset is not None:
        return [Path(corpus.dataset)]
    return paths_of(corpus)
