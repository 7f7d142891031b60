"""Preparation of data: text to a folder of Arrow files and a tokenizer, as a stream, completely or not at all."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mtkit.data.builtin_text import write_builtin_text
from mtkit.data.chunks import SideText
from mtkit.data.cleaning import Repeats, Seen
from mtkit.data.encode import Encoder, encoding_processes
from mtkit.data.place import Corpora, check_contents, check_place, corpora_of, identify, join_changes
from mtkit.data.prepared import open_prepared
from mtkit.data.record import FORMAT, Record, fingerprint_of, read_record
from mtkit.data.resolve import with_languages, with_named_sets, with_task_defaults, with_tokenizer
from mtkit.data.shards import Shards, check_joined
from mtkit.data.sides import SideWriter
from mtkit.data.training_side import begin_shards, check_parts, check_size
from mtkit.data.vocabulary import copy_tokenizers
from mtkit.errors import DataError, DiffersError
from mtkit.recipe import differences
from mtkit.recipe.data import DataSettings
from mtkit.storage.files import locked, write_json, writing
from mtkit.terminal import ProgressBar, silent
from mtkit.text.corpora import measure_corpus
from mtkit.text.tokenizer import Tokenizers
from mtkit.version import __version__


@dataclass(frozen=True)
class Report:
    """The folder that `prepare` wrote, and its record."""

    folder: Path
    unchanged: bool
    """Whether the same data existed, so that nothing was done."""
    record: Record
    """Content of prepared.json."""
    notes: Sequence[str] = ()
    """Messages about the languages of the text."""


def prepare(
    settings: DataSettings,
    *,
    overwrite: bool = False,
    progress: ProgressBar = silent,
    workers: int = 1,
    join: bool = False,
) -> Report:
    """Prepare the data that `settings` describe in `settings.folder`; see `mtkit.data.prepared` for its files.

    Nothing is done if the same settings and inputs, by their content, have been prepared already. Training pairs with
    an empty side, and others by `settings.cleaning`, are left out and counted; validation and test sides keep all
    lines. `workers` processes encode; the result does not depend on their number.

    New text is read once: it is measured while it is encoded. Before that, the tokenizer is trained on up to 64 MiB of
    it, for which text other than plain files is read another time.

    A training side of more than `mtkit.data.shards.PAIRS` pairs, or of an unknown number, is encoded in shards in
    FOLDER.partial, from which the same call resumes after a kill. With `join`, the training side consists of the parts
    that `mtkit.data.training_side.prepare_part` wrote; the result is the same.

    A corpus that a run is to translate needs both sides: see `mtkit.decoding.translated_text`.

    Raises: DataError if an input cannot be used, if the folder holds other data (and `overwrite` is False), or if the
    corpus is too small; with `join`, if a part is missing, or has other text, settings or tokenizer; MtkitError if
    another process is preparing the same folder.
    """
    settings, notes = with_languages(with_task_defaults(with_tokenizer(settings)))
    settings = with_named_sets(settings)
    folder = settings.folder
    sides = corpora_of(settings)
    check_place(folder, sides, settings.tokenizer_from)
    if (folder / "prepared.json").exists() and not overwrite:
        return _check_unchanged(settings, sides, notes, progress)
    check_contents(folder, sides)
    started = time.monotonic()
    with ExitStack() as stack, writing(folder) as temporary:
        stack.enter_context(_lock_folder(folder, overwrite))
        temporary.mkdir()
        sides = sides or write_builtin_text(settings, temporary / "text", progress)
        texts = {name: SideText(name, corpora, settings) for name, corpora in sides.items()}
        if join:
            parts = check_parts(settings)
        else:
            parts = begin_shards(settings, texts["train"], temporary / "tokenizer", stack, progress)
        if parts:
            (temporary / "tokenizer").mkdir()
            copy_tokenizers(parts[0].tokenizer, temporary / "tokenizer")
        with Encoder(temporary / "tokenizer", encoding_processes(texts.values(), workers)) as encoder:
            if join:
                check_joined(parts, texts["train"], progress)
            elif parts:
                parts[0].write(settings, texts["train"], encoder, progress)
            written = _write_sides(temporary, settings, texts, encoder, parts, progress)
        check_size(settings, written["train"]["segments"], written["train"]["left_out"])
        record = _record(settings, texts, encoder.tokenizers, temporary / "tokenizer")
        record["sides"] = {name: written[name] for name in sides}
        record["seconds"] = round(time.monotonic() - started, 1)
        write_json(temporary / "prepared.json", record)
        stored = read_record(temporary)
        check_contents(folder, sides)  # again: preparation takes long
    if parts and not join:
        shutil.rmtree(parts[0].folder, ignore_errors=True)
    return Report(folder, unchanged=False, record=stored, notes=notes)


@contextmanager
def _lock_folder(folder: Path, overwrite: bool) -> Iterator[None]:
    """Lock the folder against other preparations until it is replaced."""
    place = Path(os.path.realpath(folder))
    message = f"another process is preparing {folder}; wait for it, or give another folder with --data"
    with locked(place.with_name(f".{place.name}.lock"), message):
        if (folder / "prepared.json").exists() and not overwrite:  # it did not exist before the lock
            raise DataError(f"another process has just prepared {folder}; run the command again")
        yield


def _check_unchanged(settings: DataSettings, sides: Corpora, notes: list[str], progress: ProgressBar) -> Report:
    """Report the existing data. Raises: DiffersError if it was prepared from other text or with other settings."""
    record = read_record(settings.folder)
    facts = {side: [measure_corpus(corpus, progress) for corpus in corpora] for side, corpora in sides.items()}
    _, identity = identify(settings, facts)
    if changes := differences(record["identity"], identity):
        raise DiffersError(
            f"{settings.folder} holds data prepared with other settings ({join_changes(changes)})",
            "give --overwrite to replace it, or another folder with --data",
        )
    prepared = open_prepared(settings.folder)
    prepared.check_tokenizers()
    return Report(settings.folder, unchanged=True, record=prepared.record, notes=notes)


def _write_sides(
    folder: Path,
    settings: DataSettings,
    texts: Mapping[str, SideText],
    encoder: Encoder,
    parts: Sequence[Shards],
    progress: ProgressBar,
) -> dict[str, dict[str, Any]]:
    """Write all sides, the training side from `parts` if there are any; return the counts of each."""
    held_out, written = Seen(), {}
    # the training side last: its pairs are compared with those of the others
    for name in sorted(texts, key=lambda name: name == "train"):
        side = name, texts[name].corpora, settings, encoder.tokenizers, held_out
        if name == "train" and parts:
            repeats = Repeats(lambda: chain.from_iterable(part.hashes() for part in parts), progress)
            chunks = chain.from_iterable(part.read() for part in parts)
            written[name] = SideWriter(*side, repeats).write(folder, progress(chunks, "cleaning train", None))
        else:
            written[name] = SideWriter(*side).write(folder, encoder.encode(texts[name].chunks(progress)))
    return written


def _record(
    settings: DataSettings, texts: Mapping[str, SideText], tokenizers: Tokenizers, folder: Path
) -> dict[str, Any]:
    """Return the content of prepared.json, except the counts of the sides; `folder` has the tokenizers."""
    inputs, identity = identify(settings, {name: text.facts for name, text in texts.items()})
    return {
        "format": FORMAT,
        "mtkit": __version__,
        "fingerprint": fingerprint_of(identity, folder),
        "settings": settings.model_dump(mode="json", exclude={"folder"}),
        "identity": identity,
        "inputs": inputs,
        "vocabulary": {"source": tokenizers.source.size, "target": tokenizers.target.size},
    }
