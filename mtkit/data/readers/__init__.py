"""Reading parallel text: text files, tables and data sets, as streams of segment pairs."""

from mtkit.data.readers.alignment import first_suspicious
from mtkit.data.readers.corpora import name_of, read_corpus
from mtkit.data.readers.documents import EMPTY_LINES, SegmentPair
from mtkit.data.readers.facts import Facts, measure_corpus, measure_file
from mtkit.data.readers.text import Lines, Repairs, Span, decoded, lines_of, open_file

__all__ = [
    "EMPTY_LINES",
    "Facts",
    "Lines",
    "Repairs",
    "SegmentPair",
    "Span",
    "decoded",
    "first_suspicious",
    "lines_of",
    "measure_corpus",
    "measure_file",
    "name_of",
    "open_file",
    "read_corpus",
]
