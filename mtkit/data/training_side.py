"""The training side: read for its tokenizer, and encoded in shards if it is large, or in parts on several machines."""

import json
import shutil
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from mtkit.data import shards
from mtkit.data.chunks import SideText
from mtkit.data.cleaning import REASONS
from mtkit.data.encode import Encoder, encoding_processes
from mtkit.data.place import check_place, corpora_of, join_changes, prepared_by
from mtkit.data.record import FORMAT
from mtkit.data.resolve import with_languages, with_named_sets, with_tokenizer
from mtkit.data.shards import Shards
from mtkit.data.vocabulary import TextSample, make_tokenizers, vocabulary_of
from mtkit.errors import DataError
from mtkit.recipe import differences
from mtkit.recipe.data import DataSettings
from mtkit.storage.files import inside, json_text, writing
from mtkit.storage.jobs import Part, all_parts
from mtkit.terminal import ProgressBar, silent
from mtkit.text.corpora import name_of, read_corpus
from mtkit.version import __version__

LEAST_PAIRS = 32
"""Minimum number of usable training pairs."""


def check_size(settings: DataSettings, pairs: int | None, left_out: dict[str, int] | None = None) -> None:
    """Raises: DataError for too few training pairs; the message counts the pairs `left_out` for each reason."""
    if pairs is not None and pairs < LEAST_PAIRS:
        reasons = [f"{number:,} {REASONS[reason]}" for reason, number in (left_out or {}).items() if number]
        ending = f"; left out: {', '.join(reasons)}" if reasons else ""
        more = f" and {len(settings.train) - 1} more corpora" if len(settings.train) > 1 else ""
        builtin = "builtin" if settings.task is None else "task"
        where = f"{name_of(settings.train[0])}{more} hold" if settings.train else f"data.{builtin}.train gives"
        raise DataError(
            f"{where} {pairs} usable training pairs, too few to train on; give {LEAST_PAIRS} at the very least{ending}"
            + " (--keep-overlap, or data.cleaning.overlap: false, keeps these)" * bool((left_out or {}).get("overlap"))
            + '; its first lines contain "\\r": if these are line ends, convert them with `tr "\\r" "\\n"`'
            * _has_carriage_returns(settings)
        )


def _has_carriage_returns(settings: DataSettings) -> bool:
    """Return whether a line of the first training corpus has "\\r" within it, as old Macintosh files have."""
    pairs = islice(read_corpus(settings.train[0]), LEAST_PAIRS) if settings.train else ()
    return any("\r" in pair.source or "\r" in pair.target for pair in pairs)


def begin_shards(
    settings: DataSettings, text: SideText, tokenizer: Path, stack: ExitStack, progress: ProgressBar
) -> list[Shards]:
    """Make the tokenizers, of a large training side in the folder of its shards, otherwise in `tokenizer`.

    Return the shards as one part, locked until `stack` is closed, or nothing for a small side.
    """
    sample = stack.enter_context(TextSample())
    made_of = _read_sample(settings, text, sample, progress)
    check_size(settings, text.pairs)
    if not settings.train or (text.pairs or sys.maxsize) <= shards.PAIRS:
        make_tokenizers(settings, sample, tokenizer, progress)
        return []
    folder = inside(settings.folder.parent, f"{settings.folder.name}.partial")
    part = Shards(folder, Part(1, 1), _about(settings, made_of))
    stack.push(lambda error, *_: _remove_few(settings, part) if error else None)
    stack.enter_context(part.begun())
    _make_shard_tokenizers(settings, sample, part.tokenizer, progress)
    return [part]


def prepare_part(
    settings: DataSettings, part: Part, *, progress: ProgressBar = silent, workers: int = 1
) -> tuple[Path, int]:
    """Encode one part of the training side, for `prepare(settings, join=True)`; return its folder and pairs.

    Every part trains the same tokenizer. Apart from that, it reads only its share of plain text. A killed part is
    resumed. Raises: DataError as `prepare`, and for the built-in corpus.
    """
    settings = with_named_sets(with_languages(with_tokenizer(settings))[0])
    _check_own_text(settings)
    sides = corpora_of(settings)
    check_place(settings.folder, sides, settings.tokenizer_from)
    with TextSample() as sample:
        text = SideText("train", settings.train, settings)
        made_of = _read_sample(settings, text, sample, progress)
        text.count(progress)
        check_size(settings, text.pairs)
        written = Shards(part.output(settings.folder), part, _about(settings, made_of))
        with written.begun():
            _make_shard_tokenizers(settings, sample, written.tokenizer, progress)
            with Encoder(written.tokenizer, encoding_processes([text], workers)) as encoder:
                written.write(settings, text, encoder, progress)
    return written.folder, written.record["pairs"] or 0


def check_parts(settings: DataSettings) -> list[Shards]:
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
            raise DataError(f"part {part.part} was prepared with other settings ({join_changes(changes)}); {again}")
        if record["tokenizer"] != first["tokenizer"] or vocabulary_of(part.tokenizer) != first["tokenizer"]:
            raise DataError(f"part {part.part} has another tokenizer than part 1; {again}")
        if not part.finished:
            raise DataError(f"part {part.part} is incomplete: a shard of {part.folder} is missing; {again}")
    return parts


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
