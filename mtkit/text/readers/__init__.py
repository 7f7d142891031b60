"""Reading parallel text: text files, tables and data sets, as streams of segment pairs."""

from mtkit.text.readers.corpora import (
    EMPTY_LINES,
    SegmentPair,
    first_suspicious,
    line_count,
    name_of,
    plain_files,
    read_corpus,
)
from mtkit.text.readers.facts import Facts, Measuring, measure_corpus, measure_file
from mtkit.text.readers.text import Lines, Repairs, Span, decoded, lines_of, next_line, open_file

__all__ = [
    "EMPTY_LINES",
    "Facts",
    "Lines",
    "Measuring",
    "Repairs",
    "SegmentPair",
    "Span",
    "decoded",
    "first_suspicious",
    "line_count",
    "lines_of",
    "measure_corpus",
    "measure_file",
    "name_of",
    "next_line",
    "open_file",
    "plain_files",
    "read_corpus",
]
