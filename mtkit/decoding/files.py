"""Translation and scoring of files and held-out sides: N lines in, N lines out; a repeated call resumes."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from itertools import repeat
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

from pydantic_core import from_json

from mtkit.decoding.alignment_heads import Heads
from mtkit.decoding.contexts import ContextCounts, contexts_in_documents
from mtkit.decoding.forced import Forced
from mtkit.decoding.held_out import HeldOut, Speed, files_of, n_best_lines, save, scored_line
from mtkit.decoding.lines.chunks import chunks_of, live_chunks
from mtkit.decoding.lines.documents import joins_documents
from mtkit.decoding.lines.notes import Listed, Notes
from mtkit.decoding.lines.parts import begin_part, part_lines
from mtkit.decoding.lines.rows import Text, name_of, not_blank, rows_of, same_last, source_items, unequal_ids
from mtkit.decoding.lines.source import Directions, ids_by_blank_lines
from mtkit.decoding.translation import OnProgress, Translation
from mtkit.decoding.translator import Translator
from mtkit.decoding.word_alignment import Links, pharaoh
from mtkit.decoding.word_scores import score_words
from mtkit.errors import MtkitError, shown
from mtkit.recipe import DecodingSettings
from mtkit.storage.files import inside, is_device, json_text
from mtkit.storage.jobs import Item, Part, open_job
from mtkit.storage.outputs import check_outputs
from mtkit.terminal import Say, quiet
from mtkit.text.markup import Marked, parse
from mtkit.text.tag_placement import restore

SIDE_CHUNK = 1_000
"""Maximum segments of a held-out side that are translated together; a kill loses the work on them."""


def translate_file(
    translator: Translator,
    source: Text,
    output: Path | BinaryIO,
    *,
    direction: str | None = None,
    documents: bool | None = None,
    document_ids: Text | None = None,
    prefixes: Text | None = None,
    scores: bool = False,
    alignments: Path | BinaryIO | None = None,
    heads: Heads | None = None,
    markup: bool = False,
    live: bool = False,
    part: Part | None = None,
    say: Say = quiet,
    on_progress: OnProgress = lambda lines: None,
) -> Notes:
    """Write the translation of each line: N lines in, N lines out; returns notes on lines that need attention.

    The file `output` appears when it is complete; the same call after an interruption skips finished lines. A stream
    gets translations as they are made. `live` lines, whose writer may wait for an answer, are translated as they
    arrive, and the lines of a document when it has ended. Several translations per line (`n_best`) have an output line
    each: number, score and text. `scores` puts the score and a tab before each text. `alignments` gets a line for each
    line too: the links between its words and the words of its translation (`mtkit.decoding.word_alignment`), by these
    `heads`, or by the mean of the last layer's.

    Each translation begins with its line of `prefixes`, which may be empty. With `markup`, inline tags are carried over
    by the same links (`mtkit.text.tag_placement`).

    `direction` is required for a run with several. With `documents`, lines of a document are translated together;
    None: as trained. Documents are separated by blank lines or given by `document_ids`, one per line. `say` gets
    messages for people, `on_progress` the number of lines just finished.

    With a `part` of a source file, only its lines are translated, into files of that part (`Part.output`), which
    `mtkit.decoding.lines.parts.join_parts` joins. A finished part is not translated again. Parts have no prefixes.

    Raises: MtkitError for options that do not combine or that the runs do not support, for a run instead of its
    translator, for a string instead of a path or of lines, and if `output` cannot be written or would replace text that
    is read or a file of a run; DataError for bad input.
    """
    if not isinstance(translator, Translator):
        raise MtkitError(f"translate_file takes a Translator, not {type(translator).__name__}; write run.translator")
    heads = Heads() if heads is None else heads
    outputs = [output] if alignments is None else [output, alignments]
    _check_outputs(outputs, [source, document_ids, prefixes], part)
    if alignments is not None or markup:
        translator.check_links()
    if prefixes is not None:
        translator.check_prefixes()
    single = {"scores": scores, "prefixes": prefixes is not None, "glossary": translator.has_glossary}
    with_ids = document_ids is not None
    joins = joins_documents(translator.runs, documents, translator.settings, ids=with_ids, **single, say=say)
    ids = document_ids if joins else None
    about = {
        **translator.identity,
        "direction": direction,
        "documents": joins and ("blank lines" if ids is None else name_of(ids, "ids")),
        "scores": scores,
        "prefixes": None if prefixes is None else name_of(prefixes, "prefixes"),
        "markup": markup,
        "heads": None if alignments is None and not markup else [heads.members, heads.shifted],
    }
    span = None
    if part is not None:
        path, paths = _check_part(translator, source, outputs, joins=joins, begun=prefixes is not None)
        span = part_lines(path, part)
        if not begin_part(part, path, span, paths, about):
            say(f"part {part} is finished: {part.output(paths[0])}")
            return Notes()
        outputs = [part.output(path) for path in paths]
    offset = 0 if span is None else span.before
    items = source_items(source, span, ids, prefixes)
    together = None if not joins else not_blank if ids is None else same_last
    with open_job(outputs, {**about, "before": offset}, Notes(), say=say) as job:
        chunks = live_chunks(items, together) if live and not job.resumes else chunks_of(items, together)
        for chunk in job.todo(chunks, on_progress):
            first, texts, *others = offset + chunk.first, *map(list, zip(*chunk.items, strict=True))
            joined = (others[0] if ids is not None else ids_by_blank_lines(texts)) if joins else None
            begun = others[0] if prefixes is not None else None
            marked = [*map(parse, texts)] if markup else []
            texts = [line.text for line in marked] or texts
            lines = translator.source(texts, direction=direction, documents=joined, prefixes=begun, first=first)
            translations = translator.translate(lines, on_progress=on_progress)
            found, links = Notes.of(translations, first), list[Links]()
            if alignments is not None or markup:
                links = translator.links(lines, [best for best, *_ in translations], heads)
            if markup:
                translations = _with_markup(marked, translations, links)
                found += Notes(unnested=Listed.of(n for n, line in enumerate(marked, first + 1) if not line.is_nested))
            written: list[Iterable[str]] = [output_lines(translations, first, translator.settings, scores=scores)]
            if alignments is not None:
                written.append(map(pharaoh, links))
            job.write(chunk, written, found)
    return job.notes


def _with_markup(
    marked: Sequence[Marked], translations: Sequence[Sequence[Translation]], links: Sequence[Links]
) -> list[list[Translation]]:
    """Carry the tags of the marked lines over to their translations, one for each, by the links of their words."""
    rows = zip(marked, translations, links, strict=True)
    return [[replace(best, text=restore(line, best.text, its))] for line, (best, *_), its in rows]


def force_file(
    translator: Translator,
    sources: Text,
    targets: Text,
    output: Path | BinaryIO,
    *,
    directions: Directions | str | None = None,
    documents: bool | None = None,
    document_ids: Text | None = None,
    words: bool = False,
    say: Say = quiet,
    on_progress: OnProgress = lambda lines: None,
) -> None:
    """Write the log-probability of each target line given its source line; a call resumes like `translate_file`.

    With `documents`, each line is scored after the lines that precede it in its document, as many as fit; None: as
    trained. Documents are separated by blank lines or given by `document_ids`, one per line. `directions` are the
    directions of the lines, or the name of one for all; None: the only one. `words` writes JSON objects with the
    log-probabilities of words and pieces (`WordScores`).

    Raises: DataError for unequal numbers of lines, and for a line that is too long for the model; MtkitError as
    `translate_file`.
    """
    _check_outputs([output], [sources, targets, document_ids])
    with_ids = document_ids is not None
    joins = joins_documents(translator.runs, documents, translator.settings, ids=with_ids, forced=True, say=say)
    unpaired = f"must have as many lines as {name_of(sources, 'the sources')}, a translation each"
    texts, messages = [sources, targets], [f"{name_of(targets, 'the targets')} {unpaired}"]
    if joins and document_ids is not None:
        texts, messages = [*texts, document_ids], [*messages, unequal_ids(document_ids)]
    rows = rows_of(texts, messages)
    if not isinstance(directions, Directions):
        directions = translator.directions(directions, 1)
        names: Iterable[str] = repeat(directions.names_of_lines()[0])
    else:
        names = directions.names_of_lines()
    items: Iterable[Item] = ((*row[:2], name, *row[2:]) for row, name in zip(rows, names, strict=False))
    limits = translator.context_limits() if joins else None
    together = None if limits is None else same_last if len(texts) > 2 else not_blank
    about = {**translator.identity, "forced": True, "words": words, "limits": limits and astuple(limits)}
    with open_job([output], about, ContextCounts(), say=say) as job:
        for chunk in job.todo(chunks_of(items, together, None if limits is None else SIDE_CHUNK), on_progress):
            lines, references, chosen, *ids = map(list, zip(*chunk.items, strict=True))
            tasks = [directions.names.index(name) for name in chosen]
            source = translator.source(lines, direction=Directions(directions.names, tasks), first=chunk.first)
            contexts = None
            if limits is not None:
                of_lines = ids[0] if ids else ids_by_blank_lines(lines)
                contexts = contexts_in_documents(lines, references, of_lines, limits.pieces)
            forced = translator.force_pieces(source, references, contexts, limits, on_progress=on_progress)
            job.write(chunk, [_score_lines(translator, references, forced, words=words)], ContextCounts.of(forced))
    if limits is not None and (message := job.notes.message(limits)):
        say(message)


def _score_lines(
    translator: Translator, targets: Sequence[str], forced: Sequence[Forced], *, words: bool
) -> Iterable[str]:
    if not words:
        return [f"{line.log_prob:.6f}" for line in forced]
    scores = map(partial(score_words, translator.tokenizers.target), targets, forced)
    return [json_text(asdict(line), ensure_ascii=False) for line in scores]


def translate_side(
    translator: Translator,
    side: HeldOut,
    *,
    joined: bool,
    say: Say = quiet,
    on_progress: OnProgress = lambda lines: None,
) -> tuple[list[list[Translation]], Speed, Path]:
    """Translate a held-out side into the folder of the first run; a call resumes like `translate_file`.

    Documents are translated together if they are `joined`. The file name of an ensemble includes the names of the other
    runs: test+two. Returns the translations, their speed, with the time of interrupted calls, and the path of the text.
    Until all segments are translated, a line of JSON for each is kept in `.test.jsonl.partial` in the same folder.

    Raises: MtkitError if the folder cannot be written, or if another process is translating the side.
    """
    run, lines = translator.runs[0], translator.side_lines(side, joined=joined)
    name = "+".join([side.name, *(other.folder.resolve().name for other in translator.runs[1:])])
    folder = files_of(run, name)["txt"].parent  # before the work, as a link among the files is an error
    path = inside(folder, f".{name}.jsonl")
    count = len(lines.lines)
    directions = lines.directions.names_of_lines() if lines.directions else [""] * count
    ids = [str(document) for document in lines.documents.ids] if lines.documents else [""] * count
    about = {**translator.about, "by_documents": lines.documents is not None}
    identity = {**translator.identity, **about, "document_pieces": translator.document_pieces}
    with open_job([path], identity, Notes(), say=say) as job:
        items = zip(lines.lines, directions, ids, strict=True)
        for chunk in job.todo(chunks_of(items, _same_document, SIDE_CHUNK), on_progress):
            begin, rows = monotonic(), range(chunk.first, chunk.first + len(chunk.items))
            translations = translator.translate(lines.at(rows), on_progress=on_progress)
            share = (monotonic() - begin) / len(rows)
            rows_of_json = [json_text({"seconds": share, "found": [*map(asdict, line)]}) for line in translations]
            job.write(chunk, [rows_of_json], Notes())
    translations, seconds = _read_side(path)
    speed = Speed(seconds, count, sum(len(best.pieces) for best, *_ in translations))
    renamed = replace(side, name=name, directions=lines.directions)
    return translations, speed, save(run, renamed, translations, speed, about)


def _read_side(path: Path) -> tuple[list[list[Translation]], float]:
    """Read the translations in a file and their seconds, and remove it. Raises: MtkitError if it is damaged."""
    translations, seconds = list[list[Translation]](), 0.0
    try:
        for line in path.read_bytes().splitlines():
            row = from_json(line)
            translations.append([_translation(values) for values in row["found"]])
            seconds += row["seconds"]
    except (ValueError, KeyError, TypeError) as error:
        raise MtkitError(f"{path} is damaged; the same command translates that side again") from error
    finally:
        path.unlink()
    return translations, seconds


def _translation(row: dict[str, Any]) -> Translation:
    """Return the translation of JSON values, in which null is minus infinity."""
    row |= {name: -inf for name in ("score", "log_prob") if row[name] is None}
    return Translation(**row | {"pieces": tuple(row["pieces"]), "of_parts": tuple(map(_translation, row["of_parts"]))})


def output_lines(
    translations: Sequence[Sequence[Translation]], first: int, settings: DecodingSettings, *, scores: bool
) -> Iterable[str]:
    """Return the output of lines from number `first` on, from 0."""
    if settings.n_best > 1:
        return n_best_lines(translations, first)
    return [scored_line(best) if scores else best.text for best, *_ in translations]


def _check_outputs(outputs: Sequence[Path | BinaryIO], texts: Sequence[Text | None], part: Part | None = None) -> None:
    """Raises: MtkitError for a string instead of a path or of lines; as `check_outputs`, for outputs that are paths."""
    for text in (*outputs, *texts):
        if isinstance(text, str):
            raise MtkitError(f"{shown(text)} is one string; give a Path for a file, or a list of lines")
    paths = [output for output in outputs if isinstance(output, Path)]
    if part is not None:
        paths += [*map(part.output, paths), *map(part.record, paths[:1])]
    check_outputs(paths, [text for text in texts if isinstance(text, Path)])


def _check_part(
    translator: Translator, source: Text, outputs: Sequence[Path | BinaryIO], *, joins: bool, begun: bool
) -> tuple[Path, list[Path]]:
    """Return the files of a part's source and outputs. Raises: MtkitError for what cannot be done in parts."""
    paths = [path for path in (source, *outputs) if isinstance(path, Path) and not is_device(path)]
    if len(paths) <= len(outputs):
        raise MtkitError("parts are read from a file and written to files; give --input and --output a file each")
    if joins:
        raise MtkitError("a part may end in the middle of a document; give --sentences, or leave --part out")
    if begun:
        raise MtkitError(
            "prefixes have a line per line of the input, and its parts are divided by bytes; leave --prefix out, or "
            "translate in one process without --part"
        )
    if translator.settings.n_best > 1:
        raise MtkitError(f"a part has one translation per line, and decoding.n_best = {translator.settings.n_best}")
    return paths[0], paths[1:]


def _same_document(one: Item, other: Item) -> bool:
    return one[2] == other[2] != ""
