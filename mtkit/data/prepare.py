"""Preparing data: text to a folder of Arrow files and a tokenizer, in a stream, whole or not at all."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mtkit.data import shards
from mtkit.data.builtin.corpus import corpus as builtin_corpus
from mtkit.data.chunks import SideText
from mtkit.data.cleaning import REASONS, Repeats, Seen
from mtkit.data.encode import Encoder
from mtkit.data.place import Corpora, check_contents, check_place, identify, prepared_by
from mtkit.data.prepared import FORMAT, Record, open_prepared, read_record
from mtkit.data.resolve import with_languages, with_named_sets, with_tokenizer
from mtkit.data.shards import Shards, check_joined
from mtkit.data.sides import SideWriter
from mtkit.data.vocabulary import TextSample, copy_tokenizers, make_tokenizers, vocabulary_of
from mtkit.errors import DataError, DiffersError
from mtkit.recipe import differences
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.storage.files import inside, json_text, locked, write_json, writing
from mtkit.storage.jobs import Part, all_parts
from mtkit.terminal import ProgressBar, silent
from mtkit.text.corpora import measure_corpus, name_of
from mtkit.version import __version__

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
    notes: Sequence[str] = ()
    """Lines for people about the languages of the text."""


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

    Where nothing is prepared yet, text is read once: it is measured while it is encoded. Before, the tokenizer is
    trained on up to 64 MiB of it; text other than plain files is read once more for that.

    A training side of more than `mtkit.data.shards.PAIRS` pairs, or of an unknown number, is encoded in shards beside
    the folder, in FOLDER.partial, from which the same call goes on after a kill. With `join`, the training side is made
    of the parts that `prepare_part` wrote; the result is the same.

    A corpus that a run is to translate needs both sides: see `mtkit.decoding.translated_text`.

    Raises: DataError where an input cannot be used, where the folder holds other data (and `overwrite` is False), or
    where the corpus is too small; with `join`, where a part is missing, or of other text, settings or tokenizer;
    MtkitError where another process is preparing the same folder.
    """
    settings, notes = with_languages(with_tokenizer(settings))
    settings = with_named_sets(settings)
    folder = settings.folder
    sides = _sides(settings)
    check_place(folder, sides, settings.tokenizer_from)
    if (folder / "prepared.json").exists() and not overwrite:
        return _unchanged(settings, sides, notes, progress)
    check_contents(folder, sides)
    started = time.monotonic()
    with ExitStack() as stack, writing(folder) as temporary:
        stack.enter_context(_alone_at(folder, overwrite))
        temporary.mkdir()
        sides = sides or _write_builtin(settings, temporary / "text", progress)
        texts = {name: SideText(name, corpora, settings) for name, corpora in sides.items()}
        parts = _joined(settings) if join else []
        if not join:
            sample = stack.enter_context(TextSample())
            made_of = _sampled(settings, texts["train"], sample, progress)
            _check_size(settings, texts["train"].pairs)
            if settings.train and (texts["train"].pairs or sys.maxsize) > shards.PAIRS:
                parts = [Shards(_partial(folder), Part(1, 1), _about(settings, made_of))]
                stack.push(lambda error, *_: _tidy(settings, parts[0]) if error else None)
                stack.enter_context(parts[0].begun())
                _keep_tokenizers(settings, sample, parts[0].tokenizer, progress)
            else:
                make_tokenizers(settings, sample, temporary / "tokenizer", progress)
        if parts:
            (temporary / "tokenizer").mkdir()
            copy_tokenizers(parts[0].tokenizer, temporary / "tokenizer")
        with Encoder(temporary / "tokenizer", _processes(texts.values(), workers)) as encoder:
            if join:
                check_joined(parts, texts["train"], progress)
            elif parts:
                parts[0].write(settings, texts["train"], encoder, progress)
            written = _write_sides(temporary, settings, texts, encoder, parts, progress)
        _check_size(settings, written["train"]["segments"], written["train"]["left_out"])
        inputs, identity = identify(settings, {name: text.facts for name, text in texts.items()})
        tokenizers = encoder.tokenizers
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
    return Report(folder, unchanged=False, record=read, notes=notes)


@contextmanager
def _alone_at(folder: Path, overwrite: bool) -> Iterator[None]:
    """Keeps other preparations of the folder out, until it has been replaced."""
    place = Path(os.path.realpath(folder))
    held = f"another process is preparing {folder}; wait for it, or give another folder with --data"
    with locked(place.with_name(f".{place.name}.lock"), held):
        if (folder / "prepared.json").exists() and not overwrite:  # since it was looked for
            raise DataError(f"another process has just prepared {folder}; run the command again")
        yield


def _unchanged(settings: DataSettings, sides: Corpora, notes: list[str], progress: ProgressBar) -> Report:
    """The data that is there. Raises: DiffersError where it was prepared from other text or with other settings."""
    found = read_record(settings.folder)
    facts = {side: [measure_corpus(corpus, progress) for corpus in corpora] for side, corpora in sides.items()}
    _, identity = identify(settings, facts)
    if changes := differences(found["identity"], identity):
        raise DiffersError(
            f"{settings.folder} holds data prepared with other settings ({_listed(changes)})",
            "give --overwrite to replace it, or another folder with --data",
        )
    return Report(settings.folder, unchanged=True, record=open_prepared(settings.folder).record, notes=notes)


def prepare_part(
    settings: DataSettings, part: Part, *, progress: ProgressBar = silent, workers: int = 1
) -> tuple[Path, int]:
    """Encode one part of the training side, for `prepare(settings, join=True)`; its folder and number of pairs.

    Every part trains the tokenizer, which comes out the same. Of plain text it reads its own share beyond that. A part
    that was killed goes on; what was encoded of the same text is not made again. Raises: DataError as `prepare`, and
    for the built-in corpus.
    """
    settings = with_named_sets(with_languages(with_tokenizer(settings))[0])
    _check_parted(settings)
    sides = _sides(settings)
    check_place(settings.folder, sides, settings.tokenizer_from)
    with TextSample() as sample:
        text = SideText("train", settings.train, settings)
        made_of = _sampled(settings, text, sample, progress)
        text.count(progress)
        _check_size(settings, text.pairs)
        written = Shards(part.output(settings.folder), part, _about(settings, made_of))
        with written.begun():
            _keep_tokenizers(settings, sample, written.tokenizer, progress)
            with Encoder(written.tokenizer, _processes([text], workers)) as encoder:
                written.write(settings, text, encoder, progress)
    return written.folder, written.record["pairs"] or 0


def _sampled(settings: DataSettings, text: SideText, sample: TextSample, progress: ProgressBar) -> str:
    """Fingerprint of what the tokenizer is made of: the sample, or the models that are taken over."""
    if settings.tokenizer_from is not None:
        return vocabulary_of(settings.tokenizer_from / "tokenizer")
    if (lines := sample.read(text.corpora, progress)) is not None:
        text.lines = [*lines]
    return sample.fingerprint


def _about(settings: DataSettings, made_of: str) -> dict[str, Any]:
    return {"format": FORMAT, "mtkit": __version__, "settings": prepared_by(settings), "tokenizer": made_of}


def _check_parted(settings: DataSettings) -> None:
    if not settings.train:
        raise DataError("the built-in corpus is not prepared in parts; give your own text with --train and --valid")


def _joined(settings: DataSettings) -> list[Shards]:
    """All parts of the training side. Raises: DataError where one is missing, or of other settings or tokenizer."""
    _check_parted(settings)
    folder = settings.folder

    def of(part: Part) -> Shards:
        return Shards(part.output(folder), part, {})

    parts = [of(part) for part in all_parts([folder], lambda part: of(part).record["pairs"] is not None, "prepare")]
    first = parts[0].record
    about = json.loads(json_text(_about(settings, first["about"]["tokenizer"])))
    for each in parts:
        again = f"prepare it again with --part {each.part}"
        found = each.record
        if found["part"] != str(each.part):
            raise DataError(f"{each.folder} holds part {found['part']}, not {each.part}; {again}")
        if changes := differences({**found["about"], "tokenizer": about["tokenizer"]}, about):
            raise DataError(f"part {each.part} was prepared with other settings ({_listed(changes)}); {again}")
        if found["tokenizer"] != first["tokenizer"] or vocabulary_of(each.tokenizer) != first["tokenizer"]:
            raise DataError(f"part {each.part} has another tokenizer than part 1; {again}")
        if not each.finished:
            raise DataError(f"part {each.part} is not whole: a shard of {each.folder} is missing; {again}")
    return parts


def _partial(folder: Path) -> Path:
    return inside(folder.parent, f"{folder.name}.partial")


def _tidy(settings: DataSettings, part: Shards) -> None:
    """Remove shards after an error where there is little in them to go on from: no whole one, or the only one."""
    little = not part.complete or (part.record["pairs"] or shards.PAIRS) < shards.PAIRS
    if settings.tokenizer_from is not None and little:
        shutil.rmtree(part.folder, ignore_errors=True)


def _keep_tokenizers(settings: DataSettings, sample: TextSample, folder: Path, progress: ProgressBar) -> None:
    """The tokenizers in a folder that outlives a kill; they are made where it does not have them."""
    if not folder.is_dir():
        with writing(folder) as temporary:
            make_tokenizers(settings, sample, temporary, progress)


def _write_sides(
    folder: Path,
    settings: DataSettings,
    texts: Mapping[str, SideText],
    encoder: Encoder,
    parts: Sequence[Shards],
    progress: ProgressBar,
) -> dict[str, dict[str, Any]]:
    """Write all sides, the training side from `parts` if there are any; what was counted of each."""
    held_out, written = Seen(), {}
    # the training side last: it is searched for what the others hold
    for name in sorted(texts, key=lambda name: name == "train"):
        side = name, texts[name].corpora, settings, encoder.tokenizers, held_out
        if name == "train" and parts:
            repeats = Repeats(lambda: chain.from_iterable(each.hashes() for each in parts), progress)
            read = chain.from_iterable(each.read() for each in parts)
            written[name] = SideWriter(*side, repeats).write(folder, progress(read, "cleaning train", None))
        else:
            written[name] = SideWriter(*side).write(folder, encoder.encode(texts[name].chunks(progress)))
    return written


def _processes(texts: Iterable[SideText], workers: int) -> int:
    """One where there is so little text that more take longer."""
    return 1 if sum(text.pairs or sys.maxsize for text in texts) <= _ALONE else workers


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


def _check_size(settings: DataSettings, pairs: int | None, left_out: dict[str, int] | None = None) -> None:
    if pairs is not None and pairs < LEAST_PAIRS:
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
