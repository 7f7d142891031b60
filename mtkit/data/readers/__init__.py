"""Reading parallel text: text files, tables and data sets, as streams of segment pairs."""

from mtkit.data.readers.alignment import first_suspicious
from mtkit.data.readers.corpora import line_count, name_of, plain_files, read_corpus
from mtkit.data.readers.documents import EMPTY_LINES, SegmentPair
from mtkit.data.readers.facts import Facts, Measuring, measure_corpus, measure_file
from mtkit.data.readers.text import Lines, Repairs, Span, decoded, lines_of, next_line, open_file

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
