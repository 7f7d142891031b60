"""Preparing data: text to a folder of Arrow files and a tokenizer, in a stream, whole or not at all."""

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mtkit import __version__
from mtkit.data import shards
from mtkit.data.borrowed import copy_tokenizers, vocabulary_of, with_tokenizer
from mtkit.data.cleaning import REASONS, Seen
from mtkit.data.encode import Encoder
from mtkit.data.grammar.corpus import corpus as builtin_corpus
from mtkit.data.lines.parts import FilePart, all_parts
from mtkit.data.prepared import open_prepared
from mtkit.data.prepared.identity import Corpora, identified, lines_of
from mtkit.data.prepared.place import check_contents, check_place
from mtkit.data.prepared.record import FORMAT, Record, read_record
from mtkit.data.progress import ProgressBar, silent
from mtkit.data.readers import name_of
from mtkit.data.readers.named_sets import with_named_sets
from mtkit.data.shards import Shards
from mtkit.data.sides import SideWriter
from mtkit.data.subword.sample import TextSample
from mtkit.data.subword.training import train_tokenizers
from mtkit.data.tokenizer import Tokenizers
from mtkit.errors import DataError, DiffersError
from mtkit.files import json_text, write_json, writing
from mtkit.recipe import differences
from mtkit.recipe.data import Corpus, DataSettings

LEAST_PAIRS = 32
"""Usable training pairs below which there is nothing to learn from."""

_ALONE = 20_000
"""Segments up to which starting more processes takes longer than it saves."""


@dataclass(frozen=True)
class Report:
    """The folder that `prepare` wrote, and its record."""

    folder: Path
    unchanged: bool
    """True where the same data was there already, and nothing was done."""
    record: Record
    """Content of prepared.json."""


def prepare(
    settings: DataSettings,
    *,
    overwrite: bool = False,
    progress: ProgressBar = silent,
    workers: int = 1,
    join: bool = False,
) -> Report:
    """Prepare the data that `settings` describe in `settings.folder`; see `mtkit.data.prepared` for what lies there.

    Does nothing where the same settings and inputs, by their content, have been prepared already. Training pairs with
    an empty side, and what `settings.cleaning` says, are left out and counted; validation and test sides are kept line
    by line, whatever they hold. `workers` processes encode; what they write does not depend on how many.

    A training side of more than `mtkit.data.shards.PAIRS` pairs is encoded in shards beside the folder, in
    FOLDER.partial, from which the same call goes on after a kill. With `join`, the training side is made of the parts
    that `prepare_part` wrote; the result is the same.

    A corpus that a run is to translate needs both sides: see `mtkit.decoding.translated_text`.

    Raises: DataError where an input cannot be used, where the folder holds other data (and `overwrite` is False), or
    where the corpus is too small; with `join`, where a part is missing, or of other text, settings or tokenizer.
    """
    settings = with_named_sets(with_tokenizer(settings))
    folder = settings.folder
    sides = _sides(settings)
    check_place(folder, sides, settings.tokenizer_from)
    with TextSample() as sample:
        return _prepared(settings, sides, overwrite, progress, workers, join, sample)


def _prepared(
    settings: DataSettings,
    sides: Corpora,
    overwrite: bool,
    progress: ProgressBar,
    workers: int,
    join: bool,
    sample: TextSample,
) -> Report:
    """What `prepare` does, with a sample of the training text that is taken on the way."""
    folder = settings.folder
    kept = (folder / "prepared.json").exists() and not overwrite
    sampled = not (kept or join or _has_tokenizers(settings, _partial(folder)))
    inputs, identity = identified(settings, sides, progress, sample if sampled else None)
    if kept:
        found = read_record(folder)
        if changes := differences(found["identity"], identity):
            raise DiffersError(
                f"{folder} holds data prepared with other settings ({_listed(changes)})",
                "give --overwrite to replace it, or another folder with --data",
            )
        return Report(folder, unchanged=True, record=open_prepared(folder).record)
    check_contents(folder, sides)
    if sides:
        lines = {name: lines_of(name, corpora, inputs) for name, corpora in sides.items()}
    else:
        lines = {name: [getattr(settings.builtin, name)] for name in ("train", "valid", "test")}
    _check_size(settings, sum(lines["train"]))
    parts = _parts(settings, identity, sum(lines["train"]), join)
    started = time.monotonic()
    with ExitStack() as stack, writing(folder) as temporary:
        temporary.mkdir()
        sides = sides or _write_builtin(settings, temporary / "text", progress)
        if parts and not join:
            stack.enter_context(parts[0].begun())
            _keep_tokenizers(settings, sample, parts[0].tokenizer, progress)
        if parts:
            (temporary / "tokenizer").mkdir()
            copy_tokenizers(parts[0].tokenizer, temporary / "tokenizer")
            tokenizers = Tokenizers.load(temporary / "tokenizer")
        else:
            tokenizers = _tokenizers(settings, sides["train"], sample, temporary / "tokenizer", progress)
        with Encoder(temporary / "tokenizer", _processes(lines, workers)) as encoder:
            if parts and not join:
                parts[0].write(settings, lines["train"], encoder, progress)
            written = _write_sides(temporary, settings, sides, lines, tokenizers, encoder, parts, progress)
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
        check_contents(folder, sides)  # once more: all that took its time
    if parts and not join:
        shutil.rmtree(parts[0].folder, ignore_errors=True)
    return Report(folder, unchanged=False, record=read)


def prepare_part(
    settings: DataSettings, part: FilePart, *, progress: ProgressBar = silent, workers: int = 1
) -> tuple[Path, int]:
    """Encode one part of the training side, for `prepare(settings, join=True)`; its folder and number of pairs.

    Every part measures all the text, and trains the tokenizer, which comes out the same. A part that was killed goes
    on; a finished one is not made again. Raises: DataError as `prepare`, and for the built-in corpus.
    """
    settings = with_named_sets(with_tokenizer(settings))
    _check_parted(settings)
    sides = _sides(settings)
    check_place(settings.folder, sides, settings.tokenizer_from)
    folder = part.output(settings.folder)
    with TextSample() as sample:
        sampled = not _has_tokenizers(settings, folder)
        inputs, identity = identified(settings, sides, progress, sample if sampled else None)
        lines = lines_of("train", settings.train, inputs)
        _check_size(settings, sum(lines))
        written = Shards(folder, part, _about(identity))
        if not written.finished:
            with written.begun():
                _keep_tokenizers(settings, sample, written.tokenizer, progress)
                with Encoder(written.tokenizer, _processes({"train": lines}, workers)) as encoder:
                    written.write(settings, lines, encoder, progress)
    return written.folder, int(written.record["pairs"])


def _about(identity: dict[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "mtkit": __version__, **identity}


def _check_parted(settings: DataSettings) -> None:
    if not settings.train:
        raise DataError("the built-in corpus is not prepared in parts; give your own text with --train and --valid")


def _parts(settings: DataSettings, identity: dict[str, Any], pairs: int, join: bool) -> list[Shards]:
    """What the training side is read from: finished parts to `join`, or shards yet to be written; none if it is small.

    Raises: DataError where a part is missing, or of other text, settings or tokenizer.
    """
    folder, about = settings.folder, _about(identity)
    if not join:
        return [Shards(_partial(folder), FilePart(1, 1), about)] if settings.train and pairs > shards.PAIRS else []
    _check_parted(settings)

    def of(part: FilePart) -> Shards:
        return Shards(part.output(folder), part, about)

    parts = [of(part) for part in all_parts([folder], lambda part: of(part).record["pairs"] is not None, "prepare")]
    tokenizers = [each.record["tokenizer"] for each in parts]
    for each, tokenizer in zip(parts, tokenizers, strict=True):
        again = f"prepare it again with --part {each.part}"
        found = each.record
        if found["part"] != str(each.part):
            raise DataError(f"{each.folder} holds part {found['part']}, not {each.part}; {again}")
        if changes := differences(found["about"], json.loads(json_text(about))):
            raise DataError(f"part {each.part} was prepared with other text or settings ({_listed(changes)}); {again}")
        if tokenizer != tokenizers[0] or vocabulary_of(each.tokenizer) != tokenizer:
            raise DataError(f"part {each.part} has another tokenizer than part 1; {again}")
        if not each.finished:
            raise DataError(f"part {each.part} is not whole: a shard of {each.folder} is missing; {again}")
    if sum(each.record["pairs"] for each in parts) != pairs:
        raise DataError(f"the parts of {folder} have not {pairs:,} pairs, as the text has; prepare them again")
    return parts


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _has_tokenizers(settings: DataSettings, folder: Path) -> bool:
    """Whether tokenizers are taken over, or stand in a folder of shards; if the shards go, these go with them."""
    return settings.tokenizer_from is not None or (folder / "tokenizer").is_dir()


def _keep_tokenizers(settings: DataSettings, sample: TextSample, folder: Path, progress: ProgressBar) -> None:
    """The tokenizers in a folder that outlives a kill; they are trained, or taken over, where it does not have them."""
    if not folder.is_dir():
        with writing(folder) as temporary:
            _tokenizers(settings, settings.train, sample, temporary, progress)


def _tokenizers(
    settings: DataSettings, corpora: Sequence[Corpus], sample: TextSample, folder: Path, progress: ProgressBar
) -> Tokenizers:
    """The tokenizers of these corpora, which are read once more where they were measured without a sample."""
    if settings.tokenizer_from is None and not sample:
        sample.read(corpora, progress)
    return train_tokenizers(settings, sample, folder, progress)


def _write_sides(
    folder: Path,
    settings: DataSettings,
    sides: Corpora,
    lines: dict[str, list[int]],
    tokenizers: Tokenizers,
    encoder: Encoder,
    parts: Sequence[Shards],
    progress: ProgressBar,
) -> dict[str, dict[str, Any]]:
    """Write all sides, the training side from `parts` if there are any; what was counted of each."""
    held_out, written = Seen(), {}
    # the training side last: it is searched for what the others hold
    for name in sorted(sides, key=lambda name: name == "train"):
        writer = SideWriter(name, sides[name], settings, tokenizers, held_out)
        if name == "train" and parts:
            read = chain.from_iterable(each.read() for each in parts)
            written[name] = writer.write(folder, progress(read, "cleaning train", None))
        else:
            written[name] = writer.write(folder, encoder.encode(writer.chunks(lines[name], progress)))
        counted = [each["lines"] for each in written[name]["corpora"]]
        if settings.train and counted != lines[name]:
            raise DataError(
                f"the text of {name} changed while it was read, from {sum(lines[name]):,} lines to "
                f"{sum(counted):,}; give files that do not change, and no pipes"
            )
    return written


def _processes(lines: dict[str, list[int]], workers: int) -> int:
    return 1 if sum(map(sum, lines.values())) <= _ALONE else workers


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
