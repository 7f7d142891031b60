"""Initial embeddings of pieces from files of word vectors (`model.embeddings`).

A piece that is a word gets the word's vector, else the vector of its lower-cased form, or of its form without
punctuation at the ends. Words are pieces that begin with a space, pieces in scripts without spaces between words, and
pieces without letters (punctuation, numbers). Every other piece with text gets the mean vector of the words whose
segmentation has it, among the first `FREQUENT` words of the file: files list frequent words first. Pieces without a
vector, special pieces and bytes keep their values.

The model multiplies embeddings by sqrt(W), W their width, and new ones are drawn from N(0, 1/W), so that its inputs
have unit variance. The vectors of words are therefore multiplied by one factor, so that their mean square is 1/W, and
each mean vector is scaled to length 1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtkit.errors import DataError, RecipeError
from mtkit.model.network import Network
from mtkit.recipe import ModelSettings
from mtkit.terminal import ProgressBar, silent
from mtkit.text.tokenizer import Tokenizer, Tokenizers
from mtkit.text.word_vectors import WordLine, WordVectors
from mtkit.text.words import is_unspaced

FREQUENT = 200_000
"""First words of a file that are cut into pieces for mean vectors."""

_BATCH = 10_000
"""Words that are cut into pieces together."""

_SPACE = "\u2581"

_PUNCTUATION = re.compile(r"^\W+|\W+$")


@dataclass(frozen=True)
class InitialEmbeddings:
    """Counts of the vectors that one table of embeddings got from a file."""

    side: str
    """source, target, or both if they share the table."""
    file: str
    """Name without folder."""
    vectors: int
    """Vectors in the file."""
    pieces: int
    """Pieces of the vocabulary that have text."""
    words: int
    """Pieces with the vector of a word."""
    parts: int
    """Pieces with a mean vector."""
    scale: float
    """Factor of the words' vectors."""

    def describe(self) -> str:
        """Describe the share of pieces with a vector, for people."""
        side, filled = {"both": "source and target"}.get(self.side, self.side), self.words + self.parts
        return (
            f"{side} embeddings: {filled:,} of {self.pieces:,} pieces ({filled / self.pieces:.1%}) begin with vectors "
            f"of {self.file}: {self.words:,} as words, scaled by {self.scale:.3g}, and {self.parts:,} as parts of words"
        )


@dataclass
class _Table:
    """One table of embeddings and the vectors for it."""

    side: str
    weight: Tensor
    """(V, W)."""
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        self.sides = "both sides" if self.side == "both" else f"the {self.side}"
        pieces = self.tokenizer.size
        has_text = (self.tokenizer.bytes > 0) & ~self.tokenizer.is_byte
        self.text_pieces = [piece for piece in range(pieces) if has_text[piece]]
        self.words = {piece: word for piece in self.text_pieces if (word := _word(self.tokenizer.piece(piece)))}
        self.wanted = {form for word in self.words.values() for form in _forms(word)}
        self.vectors: dict[str, Tensor] = {}
        """The vectors (W,) of wanted words."""
        self.sums = torch.zeros(self.weight.shape, dtype=torch.float64)
        """(V, W) summed vectors of words that contain a piece."""

    def add(self, words: Sequence[str], vectors: Tensor) -> None:
        """Add frequent words, with their vectors (N, W), to the sums of the pieces that they contain."""
        pieces = [sorted(set(word_pieces)) for word_pieces in self.tokenizer.encode_lines(words)]
        rows = torch.tensor([row for row, word_pieces in enumerate(pieces) for _ in word_pieces], dtype=torch.long)
        ids = torch.tensor([piece for word_pieces in pieces for piece in word_pieces], dtype=torch.long)
        self.sums.index_add_(0, ids, vectors.double()[rows])

    def fill(self, path: Path, vectors: int) -> InitialEmbeddings:
        """Set the rows of the pieces that have a vector. Raises: DataError if there are none."""
        width = self.weight.shape[1]
        words = {
            piece: self.vectors[form]
            for piece, word in self.words.items()
            if (form := next((form for form in _forms(word) if form in self.vectors), None))
        }
        lengths = self.sums.norm(dim=1)
        parts = [piece for piece in self.text_pieces if piece not in words and lengths[piece] > 0]
        if not words and not parts:
            raise DataError(
                f"{path} has no vector for any of the {len(self.text_pieces):,} pieces of {self.sides}; give word "
                "vectors of the language"
            )
        scale = 1.0
        with torch.no_grad():
            if words:
                rows = torch.stack(list(words.values())).double()
                scale = float((width * rows.square().mean()).rsqrt())
                self.weight[list(words)] = (rows * scale).to(self.weight)
            if parts:
                self.weight[parts] = (self.sums[parts] / lengths[parts, None]).to(self.weight)
        return InitialEmbeddings(
            self.side, path.name, vectors, len(self.text_pieces), words=len(words), parts=len(parts), scale=scale
        )


def _word(text: str) -> str | None:
    """Return the word that a piece is, or None if it is only a part of words."""
    word = text.removeprefix(_SPACE)
    if not word or _SPACE in word:
        return None
    is_word = word != text or is_unspaced(word) or not any(map(str.isalpha, word))
    return word if is_word else None


def _forms(word: str) -> list[str]:
    """Return the spellings under which a word is looked up, in order."""
    bare = _PUNCTUATION.sub("", word)
    return [form for form in (word, word.lower(), bare, bare.lower()) if form]


def load_embeddings(
    model: Network, settings: ModelSettings, tokenizers: Tokenizers, *, progress: ProgressBar = silent
) -> list[tuple[InitialEmbeddings, list[str]]]:
    """Set a new model's embeddings from the files in `model.embeddings`; a file is read once, also for two tables.

    Return the record of each table, with notes about its file.

    Raises: RecipeError if the sides share a table and have different files; DataError as `WordVectors`, and if no piece
    has a vector.
    """
    records = list[tuple[InitialEmbeddings, list[str]]]()
    tables = _tables(model, settings, tokenizers)
    for path in dict.fromkeys(path for path, _ in tables):
        of_file = [table for other, table in tables if other == path]
        file, notes = WordVectors(path, of_file[0].weight.shape[1], progress), list[str]()
        notes += _read(file, of_file) + file.notes()
        for table in of_file:
            records.append((table.fill(path, file.lines), notes))
            notes = []
    return records


def _tables(model: Network, settings: ModelSettings, tokenizers: Tokenizers) -> list[tuple[Path, _Table]]:
    files = settings.embeddings
    source, target = (None, None) if files is None else (files.source, files.target)
    weights = model.source_embedding.tokens.weight.data, model.target_embedding.tokens.weight.data
    if settings.tie == "all":
        if None not in (source, target) and source != target:
            raise RecipeError(
                f"model.tie = all has one table for both sides, but model.embeddings has two files ({source} and "
                f"{target}); give one file for both, or set model.tie: decoder"
            )
        shared = tokenizers.target if source is None else tokenizers.source
        return [(path, _Table("both", weights[0], shared)) for path in (source or target,) if path is not None]
    sides = (("source", source, tokenizers.source), ("target", target, tokenizers.target))
    return [
        (path, _Table(side, weight, tokenizer))
        for (side, path, tokenizer), weight in zip(sides, weights, strict=True)
        if path is not None
    ]


def _read(file: WordVectors, tables: Sequence[_Table]) -> list[str]:
    """Read a file into its tables; return a note about duplicates."""
    wanted = set[str]().union(*(table.wanted for table in tables))
    of_words: dict[str, Tensor] = {}
    duplicates: list[int] = []
    batch: list[WordLine] = []
    vectors: list[Tensor] = []

    def add_batch() -> None:
        for table in tables if batch else ():
            table.add([entry.word for entry in batch], torch.stack(vectors))
        batch.clear()
        vectors.clear()

    for entry in file:
        frequent, is_wanted = file.lines <= FREQUENT, entry.word in wanted
        if not (frequent or is_wanted):
            continue
        vector = torch.from_numpy(file.parse(entry))
        if not vector.any():  # no word has this direction
            continue
        if is_wanted and entry.word in of_words:
            duplicates.append(entry.line)
        elif is_wanted:
            of_words[entry.word] = vector
        if frequent:
            batch.append(entry)
            vectors.append(vector)
        if len(batch) == _BATCH:
            add_batch()
    add_batch()
    for table in tables:
        table.vectors = of_words
    if not duplicates:
        return []
    first = f"{len(duplicates):,} lines repeat a word, the first is line {duplicates[0]:,}"
    return [f"{first}; each word has its first vector"]
