"""Preparation of data: text to a folder of Arrow files and a tokenizer, as a stream, completely or not at all."""

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
from mtkit.data.builtin.registry import builtin_sides
from mtkit.data.chunks import SideText
from mtkit.data.cleaning import REASONS, Repeats, Seen
from mtkit.data.encode import Encoder
from mtkit.data.place import CONTRASTIVE, Corpora, check_contents, check_place, identify, prepared_by
from mtkit.data.prepared import open_prepared
from mtkit.data.record import FORMAT, Record, fingerprint_of, read_record
from mtkit.data.resolve import with_languages, with_named_sets, with_task_defaults, with_tokenizer
from mtkit.data.shards import Shards, check_joined
from mtkit.data.sides import SideWriter
from mtkit.data.vocabulary import TextSample, copy_tokenizers, make_tokenizers, vocabulary_of
from mtkit.errors import DataError, DiffersError
from mtkit.recipe import differences
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.storage.files import inside, json_text, locked, write_json, write_text, writing
from mtkit.storage.jobs import Part, all_parts
from mtkit.terminal import ProgressBar, silent
from mtkit.text.corpora import measure_corpus, name_of
from mtkit.version import __version__

LEAST_PAIRS = 32
"""Minimum number of usable training pairs."""

_ONE_PROCESS = 20_000
"""Maximum segments for which one process is faster than starting several."""


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
    that `prepare_part` wrote; the result is the same.

    A corpus that a run is to translate needs both sides: see `mtkit.decoding.translated_text`.

    Raises: DataError if an input cannot be used, if the folder holds other data (and `overwrite` is False), or if the
    corpus is too small; with `join`, if a part is missing, or has other text, settings or tokenizer; MtkitError if
    another process is preparing the same folder.
    """
    settings, notes = with_languages(with_task_defaults(with_tokenizer(settings)))
    settings = with_named_sets(settings)
    folder = settings.folder
    sides = _sides(settings)
    check_place(folder, sides, settings.tokenizer_from)
    if (folder / "prepared.json").exists() and not overwrite:
        return _check_unchanged(settings, sides, notes, progress)
    check_contents(folder, sides)
    started = time.monotonic()
    with ExitStack() as stack, writing(folder) as temporary:
        stack.enter_context(_lock_folder(folder, overwrite))
        temporary.mkdir()
        sides = sides or _write_builtin(settings, temporary / "text", progress)
        texts = {name: SideText(name, corpora, settings) for name, corpora in sides.items()}
        if join:
            parts = _check_parts(settings)
        else:
            parts = _begin_shards(settings, texts["train"], temporary / "tokenizer", stack, progress)
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
            "fingerprint": fingerprint_of(identity, temporary / "tokenizer"),
            "settings": settings.model_dump(mode="json", exclude={"folder"}),
            "identity": identity,
            "inputs": inputs,
            "normalization": {"source": settings.tokenizer.normalization, "target": "identity"},
            "vocabulary": {"source": tokenizers.source.size, "target": tokenizers.target.size},
            "sides": {name: written[name] for name in sides},
            "seconds": round(time.monotonic() - started, 1),
        }
        write_json(temporary / "prepared.json", record)
        stored = read_record(temporary)
        check_contents(folder, sides)  # again: preparation takes long
    if parts and not join:
        shutil.rmtree(parts[0].folder, ignore_errors=True)
    return Report(folder, unchanged=False, record=stored, notes=notes)


def _begin_shards(
    settings: DataSettings, text: SideText, tokenizer: Path, stack: ExitStack, progress: ProgressBar
) -> list[Shards]:
    """Make the tokenizers, of a large training side in the folder of its shards, otherwise in `tokenizer`.

    Returns the shards as one part, locked until `stack` is closed, or nothing for a small side.
    """
    sample = stack.enter_context(TextSample())
    made_of = _read_sample(settings, text, sample, progress)
    _check_size(settings, text.pairs)
    if not settings.train or (text.pairs or sys.maxsize) <= shards.PAIRS:
        make_tokenizers(settings, sample, tokenizer, progress)
        return []
    folder = inside(settings.folder.parent, f"{settings.folder.name}.partial")
    part = Shards(folder, Part(1, 1), _about(settings, made_of))
    stack.push(lambda error, *_: _remove_few(settings, part) if error else None)
    stack.enter_context(part.begun())
    _make_shard_tokenizers(settings, sample, part.tokenizer, progress)
    return [part]


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
            f"{settings.folder} holds data prepared with other settings ({_join_changes(changes)})",
            "give --overwrite to replace it, or another folder with --data",
        )
    prepared = open_prepared(settings.folder)
    prepared.check_tokenizers()
    return Report(settings.folder, unchanged=True, record=prepared.record, notes=notes)


def prepare_part(
    settings: DataSettings, part: Part, *, progress: ProgressBar = silent, workers: int = 1
) -> tuple[Path, int]:
    """Encode one part of the training side, for `prepare(settings, join=True)`; return its folder and pairs.

    Every part trains the same tokenizer. Apart from that, it reads only its share of plain text. A killed part is
    resumed. Raises: DataError as `prepare`, and for the built-in corpus.
    """
    settings = with_named_sets(with_languages(with_tokenizer(settings))[0])
    _check_own_text(settings)
    sides = _sides(settings)
    check_place(settings.folder, sides, settings.tokenizer_from)
    with TextSample() as sample:
        text = SideText("train", settings.train, settings)
        made_of = _read_sample(settings, text, sample, progress)
        text.count(progress)
        _check_size(settings, text.pairs)
        written = Shards(part.output(settings.folder), part, _about(settings, made_of))
        with written.begun():
            _make_shard_tokenizers(settings, sample, written.tokenizer, progress)
            with Encoder(written.tokenizer, _processes([text], workers)) as encoder:
                written.write(settings, text, encoder, progress)
    return written.folder, written.record["pairs"] or 0


def _read_sample(settings: DataSettings, text: SideText, sample: TextSample, progress: ProgressBar) -> str:
    """Read the tokenizer's sample; return its fingerprint, or the fingerprint of `tokenizer_from`."""
    if settings.tokenizer_from is not None:
        return vocabulary_of(settings.tokenizer_from / "tokenizer")
    if (lines := sample.read(text.corpora, progress)) is not None:
        text.lines = [*lines]
    return sample.fingerprint


def _about(settings: DataSettings, made_of: str) -> dict[str, Any]:
    return {"format": FORMAT, "mtkit": __version__, "settings": prepared_by(settings), "tokenizer": made_of}


def _check_own_text(settings: DataSettings) -> None:
    if not settings.train:
        raise DataError("built-in text is not prepared in parts; give your own text with --train and --valid")


def _check_parts(settings: DataSettings) -> list[Shards]:
    """Return all parts of the training side. Raises: DataError if one is missing or has other settings or tokenizer."""
    _check_own_text(settings)
    folder = settings.folder

    def shards_of(part: Part) -> Shards:
        return Shards(part.output(folder), part, {})

    finished = all_parts([folder], lambda part: shards_of(part).record["pairs"] is not None, "prepare")
    parts = [shards_of(part) for part in finished]
    first = parts[0].record
    about = json.loads(json_text(_about(settings, first["about"]["tokenizer"])))
    for part in parts:
        again = f"prepare it again with --part {part.part}"
        record = part.record
        if record["part"] != str(part.part):
            raise DataError(f"{part.folder} holds part {record['part']}, not {part.part}; {again}")
        if changes := differences({**record["about"], "tokenizer": about["tokenizer"]}, about):
            raise DataError(f"part {part.part} was prepared with other settings ({_join_changes(changes)}); {again}")
        if record["tokenizer"] != first["tokenizer"] or vocabulary_of(part.tokenizer) != first["tokenizer"]:
            raise DataError(f"part {part.part} has another tokenizer than part 1; {again}")
        if not part.finished:
            raise DataError(f"part {part.part} is incomplete: a shard of {part.folder} is missing; {again}")
    return parts


def _remove_few(settings: DataSettings, part: Shards) -> None:
    """Remove the shards after an error if there is little to resume from: no complete shard, or a single one."""
    few = not part.complete or (part.record["pairs"] or shards.PAIRS) < shards.PAIRS
    if settings.tokenizer_from is not None and few:
        shutil.rmtree(part.folder, ignore_errors=True)


def _make_shard_tokenizers(settings: DataSettings, sample: TextSample, folder: Path, progress: ProgressBar) -> None:
    """Make the tokenizers in a folder that remains after a kill, unless it exists."""
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


def _processes(texts: Iterable[SideText], workers: int) -> int:
    return 1 if sum(text.pairs or sys.maxsize for text in texts) <= _ONE_PROCESS else workers


def _sides(settings: DataSettings) -> Corpora:
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


def _check_size(settings: DataSettings, pairs: int | None, left_out: dict[str, int] | None = None) -> None:
    if pairs is not None and pairs < LEAST_PAIRS:
        reasons = [f"{number:,} {REASONS[reason]}" for reason, number in (left_out or {}).items() if number]
        ending = f"; left out: {', '.join(reasons)}" if reasons else ""
        more = f" and {len(settings.train) - 1} more corpora" if len(settings.train) > 1 else ""
        builtin = "builtin" if settings.task is None else "task"
        where = f"{name_of(settings.train[0])}{more} hold" if settings.train else f"data.{builtin}.train gives"
        raise DataError(
            f"{where} {pairs} usable training pairs, too few to train on; give {LEAST_PAIRS} at the very least{ending}"
            + " (--keep-overlap, or data.cleaning.overlap: false, keeps these)" * bool((left_out or {}).get("overlap"))
        )


def _join_changes(changes: Sequence[str]) -> str:
    """Join differences for a message; fingerprints of inputs and groups of settings are only named."""
    lines = []
    for change in changes:
        name, _, values = change.partition(": ")
        if name.startswith("inputs."):
            lines.append(f"{name.removeprefix('inputs.')}: other content")
        else:
            lines.append(f"{name.removeprefix('settings.')}: {'other settings' if '{' in values else values}")
    return "; ".join(lines)


def _write_builtin(settings: DataSettings, folder: Path, progress: ProgressBar) -> Corpora:
    """Draw the built-in corpus or task into plain text files, which are prepared like other text.

    The contrastive pairs of the test sides, if there are any, become a file next to `folder`.
    """
    folder.mkdir()
    sides: Corpora = {}
    contrastive: list[str] = []
    for name, side in builtin_sides(settings).items():
        ends = (settings.source_language, settings.target_language, "ids")
        source, target, ids = (folder / f"{name}.{end}" for end in ends)
        with ExitStack() as stack:
            files = [
                stack.enter_context(path.open("w", encoding="utf-8", newline="")) for path in (source, target, ids)
            ]
            for pair in progress(side.draw(), f"drawing {name}", side.size):
                for file, text in zip(files, pair, strict=True):
                    if text is not None:
                        file.write(text + "\n")
        documents = ids if ids.stat().st_size else None
        if documents is None:
            ids.unlink()
        sides[name] = (Corpus(source=source, target=target, documents=documents),)
        contrastive += [json_text(pair, ensure_ascii=False) + "\n" for pair in side.contrastive()]
    if contrastive:
        write_text(folder.parent / CONTRASTIVE, "".join(contrastive))
    return sides
