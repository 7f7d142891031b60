"""A corpus as a stream of segment pairs, wherever it comes from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mtkit.data.readers.alignment import first_suspicious
from mtkit.data.readers.documents import EMPTY_LINES, SegmentPair, parted_by_empty_lines
from mtkit.data.readers.tables import Cell, jsonl_rows, tsv_rows
from mtkit.data.readers.text import Lines, Repairs
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus


def read_corpus(corpus: Corpus, repairs: Repairs | None = None) -> Iterator[SegmentPair]:
    """The segment pairs of a corpus in order, read anew by each call and never held together.

    What is put right on the way is counted in `repairs`. Pairs with an empty side are pairs like all others.

    Raises: DataError, while reading, where something is missing or damaged, is no text, or where the two sides (or the
    ids of the documents) are not equally many.
    """
    repairs = repairs or Repairs()
    pairs = _pairs(corpus, repairs)
    return parted_by_empty_lines(pairs) if corpus.documents == EMPTY_LINES else pairs


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


def _parallel(corpus: Corpus, repairs: Repairs) -> Iterator[SegmentPair]:
    """The pairs of two text files, with the documents' ids where a third file holds them."""
    paths = [Path(str(corpus.source)), Path(str(corpus.target))]
    if corpus.documents not in (None, EMPTY_LINES):
        paths.append(Path(str(corpus.documents)))
    try:
        for number, texts in enumerate(zip(*(Lines(path, repairs) for path in paths), strict=True), start=1):
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
