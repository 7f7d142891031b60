"""Preparing data: text to a folder of Arrow files and a tokenizer, in a stream, whole or not at all."""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mtkit import __version__
from mtkit.data.encode import Progress, silent, write_side
from mtkit.data.grammar.corpus import corpus
from mtkit.data.prepared import FORMAT, SIDES, open_prepared, read_record
from mtkit.data.readers import Lines, measure_pair
from mtkit.data.tokenizer import Tokenizer, Tokenizers, train_tokenizer
from mtkit.data_settings import DataSettings, TextPair
from mtkit.errors import DataError
from mtkit.files import write_json, writing
from mtkit.recipe import differences

LEAST_PAIRS = 32
"""Usable training pairs below which there is nothing to learn from."""

_TOKENIZER_BYTES = 1 << 28
"""Text that a sentencepiece model is trained on, at most: of a larger corpus every n-th line, the same each time."""


@dataclass(frozen=True)
class Report:
    """What `prepare` did."""

    folder: Path
    unchanged: bool
    """True where the same data was there already, and nothing was done."""
    record: dict[str, Any]
    """What prepared.json holds."""


def prepare(settings: DataSettings, *, overwrite: bool = False, progress: Progress = silent) -> Report:
    """Prepare the data that `settings` describe in `settings.folder`; see `mtkit.data.prepared` for what lies there.

    Does nothing where the same settings and inputs, by their content, have been prepared already. Training pairs with
    an empty side are left out and counted; validation and test sides are kept line by line, whatever they hold.

    Raises: DataError where an input cannot be used, where the folder holds other data (and `overwrite` is False), or
    where the corpus is too small.
    """
    folder = settings.folder
    pairs = _pairs(settings)
    _check_place(folder, pairs)
    inputs = _inputs(settings, pairs)
    identity = {"settings": _identity(settings), "inputs": {name: each["sha256"] for name, each in inputs.items()}}
    if (folder / "prepared.json").exists() and not overwrite:
        found = read_record(folder)
        if changes := differences(found["identity"], identity):
            raise DataError(
                f"{folder} holds data prepared otherwise ({_listed(changes)}); "
                f"give --overwrite to replace it, or another folder with --data"
            )
        return Report(folder, unchanged=True, record=open_prepared(folder).record)
    if pairs:
        lines = {name: inputs[f"{name} source"]["lines"] for name in pairs}
    else:
        lines = {name: getattr(settings.builtin, name) for name in SIDES}
    _check_size(settings, lines["train"])
    started = time.monotonic()
    with writing(folder) as temporary:
        temporary.mkdir()
        if not pairs:
            pairs = _write_builtin(settings, temporary / "text", progress)
        tokenizers = _train_tokenizers(settings, pairs["train"], temporary / "tokenizer", progress)
        sides = {
            name: write_side(temporary, name, pair, tokenizers, lines[name], progress) for name, pair in pairs.items()
        }
        _check_size(settings, sides["train"].rows)
        record = {
            "format": FORMAT,
            "mtkit": __version__,
            "fingerprint": _fingerprint(identity, temporary / "tokenizer"),
            "settings": settings.model_dump(mode="json", exclude={"folder"}),
            "identity": identity,
            "inputs": inputs,
            "vocabulary": {"source": tokenizers.source.size, "target": tokenizers.target.size},
            "sides": {name: vars(count) for name, count in sides.items()},
            "seconds": round(time.monotonic() - started, 1),
        }
        write_json(temporary / "prepared.json", record)
    return Report(folder, unchanged=False, record=record)


def _pairs(settings: DataSettings) -> dict[str, TextPair]:
    """The text files of each side; none for the built-in corpus."""
    given = {name: getattr(settings, name) for name in SIDES}
    if settings.train is None and (settings.source_language, settings.target_language) != ("en", "de"):
        raise DataError(
            f"the built-in corpus translates en to de, not {settings.source_language} to {settings.target_language}; "
            f"give your own text with --train and --valid"
        )
    return {name: pair for name, pair in given.items() if pair is not None}


def _inputs(settings: DataSettings, pairs: dict[str, TextPair]) -> dict[str, dict[str, Any]]:
    """What identifies each input by its content, with where it lies."""
    if not pairs:
        # its held-out sides stand for the whole corpus: they change when the grammar or a seed does
        drawn = corpus(settings.builtin)
        texts = (f"{each.source}\n{each.target}\n" for name in ("valid", "test") for each in drawn[name]())
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        return {"built-in corpus": {"sha256": digest}}
    found = {}
    for name, pair in pairs.items():
        for side, path, facts in zip(("source", "target"), (pair.source, pair.target), measure_pair(pair), strict=True):
            found[f"{name} {side}"] = {"path": str(path), **vars(facts)}
    return found


def _identity(settings: DataSettings) -> dict[str, Any]:
    """The settings that decide what is prepared: text files count by content, so not by name."""
    unused = {"folder", "train", "valid", "test"} | ({"builtin"} if settings.train else set())
    return settings.model_dump(mode="json", exclude=unused)


def _check_place(folder: Path, pairs: dict[str, TextPair]) -> None:
    """The folder is replaced whole, so it must be free or hold prepared data, and nothing else that is needed."""
    place = folder.resolve()
    if folder.exists() and not (folder / "prepared.json").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is no prepared data; give another folder with --data")
    if Path.cwd().is_relative_to(place):
        raise DataError(f"{folder} is the folder that you are in; give one of its own with --data, as mtkit-data")
    for path in (path for pair in pairs.values() for path in (pair.source, pair.target)):
        if path.resolve().is_relative_to(place):
            raise DataError(f"{path} lies in {folder}, which is to be written; give another folder with --data")


def _check_size(settings: DataSettings, pairs: int) -> None:
    if pairs < LEAST_PAIRS:
        where = (
            f"{settings.train.source} and {settings.train.target} hold"
            if settings.train
            else "data.builtin.train gives"
        )
        raise DataError(
            f"{where} {pairs} usable training pairs, too few to train on; give {LEAST_PAIRS} at the very least"
        )


def _listed(changes: Sequence[str]) -> str:
    """Differences for people: what a fingerprint says is only that the content is another."""
    short = [
        f"{change.split(':')[0].removeprefix('inputs.')}: other content" if change.startswith("inputs.") else change
        for change in (each.removeprefix("settings.") for each in changes)
    ]
    return "; ".join(short)


def _fingerprint(identity: dict[str, Any], tokenizer: Path) -> str:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for model in sorted(tokenizer.iterdir()):
        digest.update(model.read_bytes())
    return digest.hexdigest()


def _write_builtin(settings: DataSettings, folder: Path, progress: Progress) -> dict[str, TextPair]:
    """Draw the built-in corpus into plain text files, from where it goes the way of all text."""
    folder.mkdir()
    pairs = {}
    for name, draw in corpus(settings.builtin).items():
        pair = TextPair(source=folder / f"{name}.en", target=folder / f"{name}.de")
        with (
            pair.source.open("w", encoding="utf-8", newline="") as source,
            pair.target.open("w", encoding="utf-8", newline="") as target,
        ):
            for segment in progress(draw(), f"drawing {name}", getattr(settings.builtin, name)):
                source.write(segment.source + "\n")
                target.write(segment.target + "\n")
        pairs[name] = pair
    return pairs


def _train_tokenizers(settings: DataSettings, pair: TextPair, folder: Path, progress: Progress) -> Tokenizers:
    folder.mkdir()

    def train(name: str, *paths: Path) -> Tokenizer:
        for _ in progress([name], f"training the {name} tokenizer", None):
            tokenizer = train_tokenizer(folder / f"{name}.model", _Sample(paths), settings.tokenizer)
        return tokenizer

    if settings.tokenizer.joint:
        joint = train("joint", pair.source, pair.target)
        return Tokenizers(joint, joint)
    return Tokenizers(train("source", pair.source), train("target", pair.target))


@dataclass(frozen=True)
class _Sample:
    """The lines of text files that a tokenizer is trained on: all, or every n-th of a large corpus."""

    paths: tuple[Path, ...]

    def __iter__(self) -> Iterator[str]:
        every = -(-sum(path.stat().st_size for path in self.paths) // _TOKENIZER_BYTES)
        lines = chain.from_iterable(Lines(path) for path in self.paths)
        return (line for number, line in enumerate(lines) if number % every == 0)
