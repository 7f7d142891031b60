"""Preparing data: text to a folder of Arrow files and a tokenizer, in a stream, whole or not at all."""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtkit import __version__
from mtkit.data.borrowed import copy_tokenizers, vocabulary_of, with_tokenizer
from mtkit.data.cleaning import REASONS, Seen
from mtkit.data.encode import Encoder
from mtkit.data.grammar.corpus import corpus as builtin_corpus
from mtkit.data.prepared import open_prepared
from mtkit.data.prepared.record import FORMAT, Record, read_record
from mtkit.data.progress import ProgressBar, silent
from mtkit.data.readers import EMPTY_LINES, measure_corpus, name_of, read_corpus
from mtkit.data.readers.named_sets import with_named_sets
from mtkit.data.sides import SideWriter
from mtkit.data.tokenizer import Folding, Tokenizers, train_tokenizer
from mtkit.errors import DataError, DiffersError
from mtkit.files import json_text, write_json, writing
from mtkit.recipe import differences
from mtkit.recipe.data import Corpus, DataSettings

LEAST_PAIRS = 32
"""Usable training pairs below which there is nothing to learn from."""

_TOKENIZER_BYTES = 1 << 26
"""Text that a sentencepiece model is trained on, at most: of a larger corpus every n-th pair, the same each time."""

_ALONE = 20_000
"""Segments up to which starting more processes takes longer than it saves."""

Corpora = dict[str, Sequence[Corpus]]


@dataclass(frozen=True)
class Report:
    """The folder that `prepare` wrote, and its record."""

    folder: Path
    unchanged: bool
    """True where the same data was there already, and nothing was done."""
    record: Record
    """Content of prepared.json."""


def prepare(
    settings: DataSettings, *, overwrite: bool = False, progress: ProgressBar = silent, workers: int = 1
) -> Report:
    """Prepare the data that `settings` describe in `settings.folder`; see `mtkit.data.prepared` for what lies there.

    Does nothing where the same settings and inputs, by their content, have been prepared already. Training pairs with
    an empty side, and what `settings.cleaning` says, are left out and counted; validation and test sides are kept line
    by line, whatever they hold. `workers` processes encode; what they write does not depend on how many.

    A corpus that a run is to translate needs both sides: see `mtkit.decoding.translated_text`.

    Raises: DataError where an input cannot be used, where the folder holds other data (and `overwrite` is False), or
    where the corpus is too small.
    """
    settings = with_named_sets(with_tokenizer(settings))
    folder = settings.folder
    sides = _sides(settings)
    _check_place(folder, sides, settings.tokenizer_from)
    inputs = _inputs(settings, sides, progress)
    identity = {"settings": prepared_by(settings), "inputs": {name: each["sha256"] for name, each in inputs.items()}}
    if (folder / "prepared.json").exists() and not overwrite:
        found = read_record(folder)
        if changes := differences(found["identity"], identity):
            raise DiffersError(
                f"{folder} holds data prepared with other settings ({_listed(changes)})",
                "give --overwrite to replace it, or another folder with --data",
            )
        return Report(folder, unchanged=True, record=open_prepared(folder).record)
    _check_contents(folder, sides)
    if sides:
        lines = {name: [inputs[each]["lines"] for each in _names(name, corpora)] for name, corpora in sides.items()}
    else:
        lines = {name: [getattr(settings.builtin, name)] for name in ("train", "valid", "test")}
    _check_size(settings, sum(lines["train"]))
    started = time.monotonic()
    with writing(folder) as temporary:
        temporary.mkdir()
        sides = sides or _write_builtin(settings, temporary / "text", progress)
        if settings.train:
            size = sum(inputs[name]["bytes"] for name in _names("train", settings.train))
        else:
            size = sum(path.stat().st_size for path in _paths(sides["train"][0]))
        tokenizers = _train_tokenizers(settings, sides["train"], size, temporary / "tokenizer", progress)
        held_out, written = Seen(), {}
        alone = sum(map(sum, lines.values())) <= _ALONE
        with Encoder(temporary / "tokenizer", 1 if alone else workers) as encoder:
            # the training side last: it is searched for what the others hold
            for name in sorted(sides, key=lambda name: name == "train"):
                writer = SideWriter(name, sides[name], settings, tokenizers, held_out)
                written[name] = writer.write(temporary, lines[name], encoder, progress)
                counted = [each["lines"] for each in written[name]["corpora"]]
                if settings.train and counted != lines[name]:
                    raise DataError(
                        f"the text of {name} changed while it was read, from {sum(lines[name]):,} lines to "
                        f"{sum(counted):,}; give files that do not change, and no pipes"
                    )
        _check_size(settings, written["train"]["segments"], written["train"]["left_out"])
        record = {
            "format": FORMAT,
            "mtkit": __version__,
            "fingerprint": _fingerprint(identity, temporary / "tokenizer"),
            "settings": settings.model_dump(mode="json", exclude={"folder"}),
            "identity": identity,
            "inputs": inputs,
            "normalization": {"source": settings.tokenizer.normalization, "target": "identity"},
            "vocabulary": {"source": tokenizers.source.size, "target": tokenizers.target.size},
            "sides": {name: written[name] for name in sides},
            "seconds": round(time.monotonic() - started, 1),
        }
        write_json(temporary / "prepared.json", record)
        read = read_record(temporary)
        _check_contents(folder, sides)  # once more: all that took its time
    return Report(folder, unchanged=False, record=read)


def _sides(settings: DataSettings) -> Corpora:
    """The corpora of each side; none for the built-in corpus."""
    if settings.train:
        for corpus in settings.train:
            if corpus.translated_by is not None:
                raise DataError(
                    f"{corpus.source or corpus.target} is not translated by {corpus.translated_by} yet; call "
                    "mtkit.decoding.translated_text.with_translations(settings) first"
                )
        return {"train": settings.train, "valid": settings.valid, **settings.test}
    if (settings.source_language, settings.target_language) != ("en", "de"):
        raise DataError(
            f"the built-in corpus translates en to de, not {settings.source_language} to {settings.target_language}; "
            f"give your own text with --train and --valid"
        )
    return {}


def _names(side: str, corpora: Sequence[Corpus]) -> list[str]:
    """What the corpora of a side are called in prepared.json."""
    return [side] if len(corpora) == 1 else [f"{side} {number}" for number in range(1, len(corpora) + 1)]


def _inputs(settings: DataSettings, sides: Corpora, progress: ProgressBar) -> dict[str, dict[str, Any]]:
    """What identifies each input by its content, with where it lies."""
    borrowed = settings.tokenizer_from
    tokenizer = {} if borrowed is None else {"the tokenizer": {"sha256": vocabulary_of(borrowed / "tokenizer")}}
    if not sides:
        # its held-out sides stand for the whole corpus: they change when the grammar or a seed does
        drawn = builtin_corpus(settings.builtin)
        texts = (f"{each.source}\n{each.target}\n" for name in ("valid", "test") for each in drawn[name]())
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        return {"built-in corpus": {"sha256": digest}, **tokenizer}
    measured = {
        name: asdict(measure_corpus(corpus, progress))
        for side, corpora in sides.items()
        for name, corpus in zip(_names(side, corpora), corpora, strict=True)
    }
    return {**measured, **tokenizer}


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


def _check_place(folder: Path, sides: Corpora, borrowed: Path | None) -> None:
    """The folder is replaced whole, so it must be free or hold prepared data, and nothing that it is made from."""
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


def _check_contents(folder: Path, sides: Iterable[str]) -> None:
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


def _check_size(settings: DataSettings, pairs: int, left_out: dict[str, int] | None = None) -> None:
    if pairs < LEAST_PAIRS:
        gone = [f"{number:,} {REASONS[reason]}" for reason, number in (left_out or {}).items() if number]
        besides = f"; left out: {', '.join(gone)}" if gone else ""
        more = f" and {len(settings.train) - 1} more corpora" if len(settings.train) > 1 else ""
        where = f"{name_of(settings.train[0])}{more} hold" if settings.train else "data.builtin.train gives"
        raise DataError(
            f"{where} {pairs} usable training pairs, too few to train on; give {LEAST_PAIRS} at the very least{besides}"
            + " (--keep-overlap, or data.cleaning.overlap: false, keeps these)" * bool((left_out or {}).get("overlap"))
        )


def _listed(changes: Sequence[str]) -> str:
    """Differences for people: what a fingerprint says is only that the content is another."""
    short = [
        f"{change.split(':')[0].removeprefix('inputs.')}: other content" if change.startswith("inputs.") else change
        for change in (each.removeprefix("settings.") for each in changes)
    ]
    return "; ".join(short)


def _fingerprint(identity: dict[str, Any], tokenizer: Path) -> str:
    digest = hashlib.sha256(json_text([FORMAT, identity], sort_keys=True).encode())
    for model in sorted(tokenizer.iterdir()):
        digest.update(model.read_bytes())
    return digest.hexdigest()


def _write_builtin(settings: DataSettings, folder: Path, progress: ProgressBar) -> Corpora:
    """Draw the built-in corpus into plain text files, from where it goes the way of all text."""
    folder.mkdir()
    sides: Corpora = {}
    for name, draw in builtin_corpus(settings.builtin).items():
        paths = folder / f"{name}.en", folder / f"{name}.de"
        with (
            paths[0].open("w", encoding="utf-8", newline="") as source,
            paths[1].open("w", encoding="utf-8", newline="") as target,
        ):
            for segment in progress(draw(), f"drawing {name}", getattr(settings.builtin, name)):
                source.write(segment.source + "\n")
                target.write(segment.target + "\n")
        sides[name] = (Corpus(source=paths[0], target=paths[1]),)
    return sides


def _train_tokenizers(
    settings: DataSettings, corpora: Sequence[Corpus], size: int, folder: Path, progress: ProgressBar
) -> Tokenizers:
    """The tokenizers of training corpora with `size` bytes of text, or those that are taken over."""
    folder.mkdir()
    if settings.tokenizer_from is not None:
        copy_tokenizers(settings.tokenizer_from / "tokenizer", folder)
        return Tokenizers.load(folder)
    several = len(settings.directions) > 1
    languages = list(dict.fromkeys(each.partition("-")[2] for each in settings.directions)) if several else []
    rule = settings.tokenizer.normalization
    folding = None if rule == "identity" else Folding(rule)
    if folding is not None:
        (folder / "folding.model").write_bytes(folding.model)
    with TemporaryDirectory(dir=folder.parent) as place:
        source, target = _write_sample(corpora, -(-size // _TOKENIZER_BYTES), folding, Path(place), progress)
        trained = {"joint": [source, target]} if settings.tokenizer.joint else {"source": [source], "target": [target]}
        for name, sides in trained.items():
            for _ in progress([name], f"training the {name} tokenizer", None):
                train_tokenizer(folder / f"{name}.model", _Lines(sides), settings.tokenizer, languages)
    return Tokenizers.load(folder)


def _write_sample(
    corpora: Sequence[Corpus], every: int, folding: Folding | None, folder: Path, progress: ProgressBar
) -> tuple[Path, Path]:
    """Write both sides of every so many pairs, the source folded.

    Tokenizers go over their text several times, a stream comes once.
    """
    paths = folder / "source", folder / "target"
    pairs = (pair for corpus in corpora for pair in read_corpus(corpus))
    with paths[0].open("wb") as source, paths[1].open("wb") as target:
        for number, pair in enumerate(progress(pairs, "reading for the tokenizer", None)):
            if number % max(every, 1) == 0:
                source.write((pair.source if folding is None else folding(pair.source)).encode() + b"\n")
                target.write(pair.target.encode() + b"\n")
    return paths


@dataclass(frozen=True)
class _Lines:
    """The lines of text files, one file after the other, as often as they are asked for."""

    paths: Sequence[Path]

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            with path.open(encoding="utf-8", newline="\n") as file:
                for line in file:
                    yield line.removesuffix("\n")
