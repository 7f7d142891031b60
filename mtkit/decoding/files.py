"""Translation and scoring of files: N lines in, N lines out; an interrupted call resumes when it is repeated."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import BinaryIO, cast

from mtkit.decoding.held_out import n_best_lines
from mtkit.decoding.lines.chunks import chunks_of, live_chunks
from mtkit.decoding.lines.notes import Notes
from mtkit.decoding.lines.parts import begin_part, part_lines
from mtkit.decoding.lines.source import Directions, ids_by_blank_lines
from mtkit.decoding.translate import OnProgress, Translation
from mtkit.decoding.translator import Translator, joins_documents
from mtkit.decoding.word_alignment import Heads, pharaoh
from mtkit.errors import DataError, MtkitError
from mtkit.storage.files import check_outputs, is_device
from mtkit.storage.jobs import Item, Part, open_job
from mtkit.text.text_files import Lines, Span

Text = Path | Iterable[str]
"""Lines: a file, .gz too, or what gives one after the other, without line ends."""


def translate_file(
    translator: Translator,
    source: Text,
    output: Path | BinaryIO,
    *,
    direction: str | None = None,
    documents: bool | None = None,
    document_ids: Text | None = None,
    scores: bool = False,
    alignments: Path | BinaryIO | None = None,
    heads: Heads | None = None,
    live: bool = False,
    part: Part | None = None,
    say: Callable[[str], object] = lambda message: None,
    on_progress: OnProgress = lambda lines: None,
) -> Notes:
    """Write the translation of each line: N lines in, N lines out; gives notes on lines that need attention.

    The file `output` appears when it is complete; the same call after an interruption skips finished lines. A stream
    gets translations as they are made. `live` lines, whose writer may wait for an answer, are translated as they
    arrive, and those of a document when it has ended. With several translations per line (`n_best`), each has its own
    output line of number, score and text. `scores` puts the score and a tab before each text. `alignments` gets a line
    for each line too: which words of its translation belong to which of its own (`mtkit.decoding.word_alignment`), by
    these `heads`, or the mean of the last layer's.

    `direction` is required for a run with several. With `documents`, lines of a document are translated together;
    None: as trained. Documents are separated by blank lines or given by `document_ids`, one per line. `say` gets
    messages for people, `on_progress` the number of lines just finished.

    With a `part` of a source file, its lines alone are translated, as in a translation of the whole, into files of that
    part (`Part.output`). `mtkit.decoding.lines.parts.join_parts` joins them. A finished part is not made again.

    Raises: MtkitError for options that do not combine, and where `output` cannot be written or would replace text that
    is read or a file of a run; DataError for bad input.
    """
    heads = Heads() if heads is None else heads
    outputs = [output] if alignments is None else [output, alignments]
    _check_outputs(outputs, [source, document_ids], part)
    if alignments is not None:
        translator.check_links()
    joins = joins_documents(translator.runs, documents, translator.settings, scores=scores, say=say)
    ids = document_ids if joins else None
    about = {
        **translator.identity,
        "direction": direction,
        "documents": joins and ("blank lines" if ids is None else _name(ids, "ids")),
        "scores": scores,
        "heads": None if alignments is None else [heads.members, heads.shifted],
    }
    span = None
    if part is not None:
        path, paths = _check_part(translator, source, outputs, joins=joins)
        span = part_lines(path, part)
        if not begin_part(part, path, span, paths, about):
            say(f"part {part} is finished: {part.output(paths[0])}")
            return Notes()
        outputs = [part.output(path) for path in paths]
    offset = 0 if span is None else span.before
    items: Iterable[Item] = zip(_lines(source, span)) if ids is None else _with_ids(source, ids)
    together = None if not joins else _not_blank if ids is None else _same_id
    with open_job(outputs, {**about, "before": offset}, Notes(), say=say) as job:
        chunks = live_chunks(items, together) if live and not job.resumes else chunks_of(items, together)
        for chunk in job.todo(chunks, on_progress):
            lines, first = [item[0] for item in chunk.items], offset + chunk.first
            in_documents: Sequence[int] | Sequence[str] | None = None
            if joins:
                in_documents = ids_by_blank_lines(lines) if ids is None else [item[1] for item in chunk.items]
            translations = translator.lines(
                lines, direction=direction, documents=in_documents, first=first, on_progress=on_progress
            )
            written = [_written(translations, first, several=translator.settings.n_best > 1, scores=scores)]
            if alignments is not None:
                best = [translation for translation, *_ in translations]
                links = translator.links(lines, best, heads, direction=direction, documents=in_documents)
                written.append(map(pharaoh, links))
            job.write(chunk, written, Notes.of(translations, first))
    return job.notes


def force_file(
    translator: Translator,
    sources: Text,
    targets: Text,
    output: Path | BinaryIO,
    *,
    directions: Directions | str | None = None,
    say: Callable[[str], object] = lambda message: None,
    on_progress: OnProgress = lambda lines: None,
) -> None:
    """Write the log-probability of each target line given its source line, resumed as `translate_file` is.

    `directions` are those of the lines, or the name of one for all; None: the only one.

    Raises: DataError for unequal numbers of lines, and for a line that is too long for the model; MtkitError as
    `translate_file` does.
    """
    _check_outputs([output], [sources, targets])
    pairs = _pairs(sources, targets)
    ways = directions if isinstance(directions, Directions) else None
    one = "" if ways else translator.directions(cast("str | None", directions), 1).names_of_lines()[0]
    names = ways.names_of_lines() if ways else repeat(one)

    items = ((*pair, name) for pair, name in zip(pairs, names, strict=False))
    with open_job([output], {**translator.identity, "forced": True}, Notes(), say=say) as job:
        for chunk in job.todo(chunks_of(items), on_progress):
            log_probs = translator.force(
                [item[0] for item in chunk.items],
                [item[1] for item in chunk.items],
                ways.part(chunk.first, len(chunk.items)) if ways else translator.directions(one, len(chunk.items)),
                first=chunk.first,
                on_progress=on_progress,
            )
            job.write(chunk, [[f"{log_prob:.6f}" for log_prob in log_probs]], Notes())


def _written(
    translations: Sequence[Sequence[Translation]], first: int, *, several: bool, scores: bool
) -> Iterable[str]:
    """The output of these lines, the first of which has the number `first`, from 0."""
    if several:
        return n_best_lines(translations, first)
    return [f"{each.score:.6f}\t{each.text}" if scores else each.text for each, *_ in translations]


def _with_ids(source: Text, ids: Text) -> Iterator[Item]:
    """Lines with the ids of their documents. Raises: DataError for unequal numbers, at once where both are known."""
    wrong = f"{_name(ids, 'the ids')} must have as many lines as the input: the id of each line's document"
    if _is_file(source) and _is_file(ids) and _count(source) != _count(ids):
        raise DataError(wrong)
    return _zipped(source, ids, wrong)


def _pairs(sources: Text, targets: Text) -> Iterator[Item]:
    """Source lines with their targets. Raises: DataError for unequal numbers, at once where both are known."""
    source, target = _count(sources), _count(targets)
    if source is not None and target is not None and source != target:
        raise DataError(f"{source:,} source lines and {target:,} target lines do not make pairs")
    return _zipped(sources, targets, "there are not as many source lines as target lines, so they do not make pairs")


def _zipped(one: Text, other: Text, wrong: str) -> Iterator[Item]:
    try:
        yield from zip(_lines(one), _lines(other), strict=True)
    except ValueError as error:
        raise DataError(wrong) from error


def _count(text: Text) -> int | None:
    """The number of lines, where they can be read more than once."""
    if _is_file(text):
        return sum(1 for _ in _lines(text))
    return len(text) if isinstance(text, Sequence) else None


def _check_outputs(outputs: Sequence[Path | BinaryIO], texts: Sequence[Text | None], part: Part | None = None) -> None:
    """Raises: MtkitError as `check_outputs`, for the outputs that are paths."""
    paths = [each for each in outputs if isinstance(each, Path)]
    if part is not None:
        paths += [*map(part.output, paths), *map(part.record, paths[:1])]
    check_outputs(paths, [each for each in texts if isinstance(each, Path)])


def _check_part(
    translator: Translator, source: Text, outputs: Sequence[Path | BinaryIO], *, joins: bool
) -> tuple[Path, list[Path]]:
    """The source and the outputs of a part, which are files. Raises: MtkitError for what cannot be done in parts."""
    paths = [path for path in (source, *outputs) if isinstance(path, Path) and not is_device(path)]
    if len(paths) <= len(outputs):
        raise MtkitError("a part is of a file and goes to files; give --input and --output a file each")
    if joins:
        raise MtkitError("a part may end in the middle of a document; give --sentences, or leave --part out")
    if translator.settings.n_best > 1:
        raise MtkitError(f"a part has one translation per line, and decoding.n_best = {translator.settings.n_best}")
    return paths[0], paths[1:]


def _not_blank(one: Item, other: Item) -> bool:
    return bool(one[0].strip() and other[0].strip())


def _same_id(one: Item, other: Item) -> bool:
    return one[1] == other[1]


def _lines(text: Text, span: Span | None = None) -> Iterable[str]:
    return Lines(text, span=span) if isinstance(text, Path) else text


def _is_file(text: Text) -> bool:
    return isinstance(text, Path) and text.is_file()


def _name(text: Text, otherwise: str) -> str:
    return str(text) if isinstance(text, Path) else otherwise
