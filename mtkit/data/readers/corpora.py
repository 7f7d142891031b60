"""A corpus as a stream of segment pairs, wherever it comes from."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from mtkit.data.readers.alignment import first_suspicious
from mtkit.data.readers.documents import EMPTY_LINES, SegmentPair, parted_by_empty_lines
from mtkit.data.readers.tables import Cell, jsonl_rows, tsv_rows
from mtkit.data.readers.text import Lines, Repairs, count_lines, span_of
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus


def read_corpus(corpus: Corpus, repairs: Repairs | None = None, *, rows: range | None = None) -> Iterator[SegmentPair]:
    """The segment pairs of a corpus in order, read anew by each call and never held together.

    What is put right on the way is counted in `repairs`. Pairs with an empty side are pairs like all others. Only
    these `rows`, counted from 0, where they are given; what lies before them is not read in plain text without
    documents that empty lines part.

    Raises: DataError, while reading, where something is missing or damaged, is no text, or where the two sides (or the
    ids of the documents) are not equally many.
    """
    repairs = repairs or Repairs()
    parted = corpus.documents == EMPTY_LINES
    if rows is not None and not parted and plain_files(corpus) is not None:
        return _parallel(corpus, repairs, rows)
    pairs = _pairs(corpus, repairs)
    pairs = parted_by_empty_lines(pairs) if parted else pairs
    return pairs if rows is None else islice(pairs, rows.start, rows.stop)


def plain_files(corpus: Corpus) -> list[Path] | None:
    """The text files of a corpus, if they can be read from the middle; None for others, packed ones and pipes."""
    if _place(corpus) is not None:
        return None
    paths = _paths(corpus)
    return paths if all(path.suffix != ".gz" and path.is_file() for path in paths) else None


def line_count(corpus: Corpus) -> int | None:
    """The segment pairs of a corpus of plain text; None of others. Raises: DataError where its files are unequal."""
    paths = plain_files(corpus)
    if paths is None:
        return None
    counts = [count_lines(path) for path in paths]
    if len(set(counts)) > 1:
        raise _unequal(paths)
    return counts[0]


def name_of(corpus: Corpus, side: Literal["source", "target"] | None = None) -> str:
    """What messages call a corpus, or one side of it: the file, and the column where there are several in it."""
    given = {"source": corpus.source, "target": corpus.target}
    place = _place(corpus)
    if place is None:
        return str(given[side]) if side else f"{corpus.source} and {corpus.target}"
    return f"{place}, column {given[side]}" if side else place


def _place(corpus: Corpus) -> str | None:
    """The one place that holds both sides, or None for two files."""
    if corpus.dataset is not None:
        return " ".join(str(part) for part in (corpus.dataset, corpus.subset, corpus.split) if part)
    return None if corpus.file is None else str(corpus.file)


def _pairs(corpus: Corpus, repairs: Repairs) -> Iterator[SegmentPair]:
    if _place(corpus) is None:
        yield from _parallel(corpus, repairs)
        return
    for line, cells in _rows(corpus, repairs):
        source, target = cells[:2]
        if not isinstance(source, str) or not isinstance(target, str):
            side: Literal["source", "target"] = "target" if isinstance(source, str) else "source"
            raise DataError(f"{name_of(corpus, side)}, line {line}: a number, not text")
        yield SegmentPair(line, source, target, *cells[2:])


def _paths(corpus: Corpus) -> list[Path]:
    """Two text files, and one with the documents' ids where there is one."""
    documents = None if corpus.documents == EMPTY_LINES else corpus.documents
    return [Path(str(path)) for path in (corpus.source, corpus.target, documents) if path is not None]


def _parallel(corpus: Corpus, repairs: Repairs, rows: range | None = None) -> Iterator[SegmentPair]:
    """The pairs of two text files, with the documents' ids where a third file holds them."""
    paths = _paths(corpus)
    spans = [None if rows is None else span_of(path, rows.start, rows.stop) for path in paths]
    lines = [Lines(path, repairs, span) for path, span in zip(paths, spans, strict=True)]
    try:
        for number, texts in enumerate(zip(*lines, strict=True), start=1 if rows is None else rows.start + 1):
            yield SegmentPair(number, *texts)
    except ValueError as error:
        raise _unequal(paths) from error


def _rows(corpus: Corpus, repairs: Repairs) -> Iterator[tuple[int, list[Cell]]]:
    """The rows of one file or data set: source, target, and the document's id where a column holds it."""
    gaps = corpus.documents == EMPTY_LINES
    given = (corpus.source, corpus.target, None if gaps else corpus.documents)
    columns = [str(column) for column in given if column is not None]
    if corpus.file is None:
        from mtkit.data.readers.sets import dataset_rows

        split, streaming = corpus.split, corpus.streaming
        return dataset_rows(str(corpus.dataset), corpus.subset, split, columns, repairs, streaming=streaming)
    kind = Path(corpus.file.name.removesuffix(".gz")).suffix
    if kind == ".tsv":
        return tsv_rows(corpus.file, columns, repairs, gaps=gaps)
    if kind == ".jsonl":
        return jsonl_rows(corpus.file, columns, repairs, gaps=gaps)
    if corpus.file.suffix == ".parquet":
        from mtkit.data.readers.arrow import parquet_rows

        return parquet_rows(corpus.file, columns, repairs)
    raise DataError(f"{corpus.file} has an unknown format; give .tsv, .jsonl (either with .gz) or .parquet")


def _unequal(paths: list[Path]) -> DataError:
    """What to say of files that go together, but not line by line."""
    counts = [sum(1 for _ in Lines(path)) for path in paths]
    (source, target), other = paths[:2], paths[2:]
    if counts[0] != counts[1]:
        where = first_suspicious(zip(Lines(source), Lines(target), strict=False))
        hint = f"they seem to part at about line {where:,}" if where else "no line looks like the first that is off"
        return DataError(
            f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}; {hint}; "
            f"line N of one must translate line N of the other, so give two files that belong together"
        )
    if other and counts[2] != counts[0]:
        return DataError(
            f"{other[0]} has {counts[2]:,} lines and {source} has {counts[0]:,}; "
            f"line N of the first must be the id of the document that line N of the other belongs to"
        )
    return DataError(f"{source} or {target} changed while it was read; run the command again")
