"""Writes one side of the data to an Arrow file, as a stream, and cleans and counts its pairs."""

from collections.abc import Callable, Iterable, Sequence
from operator import ne
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mtkit.data.chunks import Chunk
from mtkit.data.cleaning import REASONS, Repeats, Seen, examine, left_out
from mtkit.data.encode import EncodedChunk, sampled
from mtkit.data.lengths import MOST_SENTENCES
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.text.corpora import name_of
from mtkit.text.segments import Ragged, Segments, lists
from mtkit.text.tokenizer import BREAK, UNK, Tokenizer, Tokenizers

RARE = 10
"""Minimum occurrences in training for a piece to be learned well."""

_NEAR = 50
"""Lines within which the first misaligned line is located."""


class Count:
    """Counts of a side or of one of its corpora; words and pieces are counted in kept lines only."""

    def __init__(self) -> None:
        self.lines = 0
        self.segments = 0
        """Lines that were kept."""
        self.words, self.pieces, self.unknown, self.bytes, self.longest = ({"source": 0, "target": 0} for _ in range(5))
        self.sentences = {str(number): 0 for number in range(1, MOST_SENTENCES + 1)}
        """Sources of the sample by their number of sentences."""
        self.found = dict.fromkeys(REASONS, 0)
        """Lines to which each reason applies, kept or not."""
        self.left_out = dict.fromkeys(REASONS, 0)
        self.altered = 0
        """Kept segments whose target decoding its pieces does not restore."""
        self.altered_line: dict[str, Any] | None = None
        """The first of them: its line, its text, and the decoded text."""
        self.suspicious_line: int | None = None
        """The line from which on the two sides of the corpus seem not to match."""

    def add(
        self, encoded: EncodedChunk, reasons: dict[str, np.ndarray], gone: dict[str, np.ndarray], keep: np.ndarray
    ) -> None:
        """Count a chunk; `keep` is True for the pairs that are kept."""
        self.lines += len(keep)
        self.segments += int(keep.sum())
        self.altered += int((keep & encoded.altered).sum())
        for reason in REASONS:
            self.found[reason] += int(reasons[reason].sum())
            self.left_out[reason] += int(gone[reason].sum())
        if self.suspicious_line is None:
            self.suspicious_line = encoded.suspicious
        for side, words in zip(("source", "target"), encoded.words, strict=True):
            self.words[side] += int(words[keep].sum())
        sentences = encoded.sentences[keep[sampled(len(keep))]]
        counted = np.bincount(sentences.clip(1, MOST_SENTENCES), minlength=MOST_SENTENCES + 1)
        for number in self.sentences:
            self.sentences[number] += int(counted[int(number)])

    def add_pieces(self, side: str, pieces: Ragged, is_byte: np.ndarray) -> None:
        """Count the pieces of the kept segments."""
        self.pieces[side] += len(pieces.flat)
        self.unknown[side] += int((pieces.flat == UNK).sum())
        self.bytes[side] += int(is_byte[pieces.flat].sum())
        self.longest[side] = max(self.longest[side], int(pieces.lengths.max(initial=0)))


def total(counts: Sequence[Count]) -> dict[str, Any]:
    """Return the counts of a side from the counts of its corpora."""
    totals: dict[str, Any] = {}
    for name, value in vars(Count()).items():
        parts = [getattr(count, name) for count in counts]
        if isinstance(value, int):
            totals[name] = sum(parts)
        elif isinstance(value, dict):
            reduce: Callable[..., int] = max if name == "longest" else sum
            totals[name] = {key: reduce([part[key] for part in parts]) for key in value}
    return totals


def piece_use(tokenizer: Tokenizer, occurrences: np.ndarray) -> dict[str, int]:
    """Return the `PieceUse` of a vocabulary whose pieces occur (V,) times."""
    several = np.array([len(tokenizer.piece(piece)) > 1 for piece in range(tokenizer.size)])
    text = tokenizer.bytes * ~tokenizer.is_byte > 0
    dispensable = text & several & (occurrences < RARE)
    rare = dispensable & (occurrences > 0)
    return {
        "used": int((text & (occurrences > 0)).sum()),
        "rare": int(rare.sum()),
        "enough": tokenizer.size - int(dispensable.sum()),
    }


class SideAlignment:
    """Checks, chunk by chunk, that both sides of corpora match line by line."""

    def __init__(self, corpora: Sequence[Corpus], settings: DataSettings) -> None:
        self._corpora, self._required = corpora, not settings.cleaning.misaligned
        self._matched = [0 for _ in corpora]  # the last line of each corpus that was checked and matches

    def check(self, chunk: Chunk, suspicious: int | None) -> None:
        """Raises: DataError if the sides must match and seem not to from the line `suspicious` on."""
        if suspicious is not None and self._required:
            raise _misaligned(self._corpora[chunk.corpus], suspicious, chunk.lines[0], self._matched[chunk.corpus])
        self._matched[chunk.corpus] = chunk.lines[: chunk.aligned][-1]


class SideWriter:
    """Writes one side; `write` returns its entry in prepared.json."""

    def __init__(
        self,
        name: str,
        corpora: Sequence[Corpus],
        settings: DataSettings,
        tokenizers: Tokenizers,
        held_out: Seen,
        repeats: Repeats | None = None,
    ) -> None:
        """`held_out` collects the pairs of validation and test sides, written first; training is compared with it.

        `repeats`: the duplicates of this side; None if they are to be found while it is written.
        """
        self.name, self._corpora, self._settings, self._tokenizers = name, corpora, settings, tokenizers
        self._training = name == "train"
        self._seen, self._held_out = repeats or Seen(), held_out
        self._counts = [Count() for _ in corpora]
        self._documents = -1
        self._alignment = SideAlignment(corpora, settings)
        self._last: object = None
        self._several = len(settings.directions) > 1
        self._tags = np.array(tokenizers.source.tags(settings.directions), dtype=np.int64)
        self._used = {
            "source": np.zeros(tokenizers.source.size, np.int64),
            "target": np.zeros(tokenizers.target.size, np.int64),
        }
        self._breaks = self._training and settings.documents is not None
        documents = any(corpus.documents is not None for corpus in corpora)
        self._with_documents = self._breaks or (documents and not self._training)

    def write(self, folder: Path, encoded_chunks: Iterable[tuple[Chunk, EncodedChunk]]) -> dict[str, Any]:
        """Write the side to a file in `folder`, from all its chunks in order; return its counts."""
        rows = 0
        path = folder / f"{self.name}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, self._schema()) as writer:
            for chunk, encoded in encoded_chunks:
                part = self._batch(chunk, encoded)
                writer.write_batch(part)
                rows += part.num_rows
        directions = map(self._settings.direction_of, self._corpora)
        corpora = [
            {"direction": direction, **vars(count)} for direction, count in zip(directions, self._counts, strict=True)
        ]
        use = {"use": self._piece_use()} if self._training else {}
        return {"rows": rows, **total(self._counts), "corpora": corpora, **use}

    def _piece_use(self) -> dict[str, dict[str, int]]:
        """Return how often the pieces of each vocabulary occur."""
        tokenizers, used = self._tokenizers, self._used
        if tokenizers.joint:
            return {"joint": piece_use(tokenizers.source, used["source"] + used["target"])}
        return {side: piece_use(getattr(tokenizers, side), occurrences) for side, occurrences in used.items()}

    def _schema(self) -> pa.Schema:
        columns = {"source": pa.list_(pa.int32()), "target": pa.list_(pa.int32()), "line": pa.int64()}
        if self._several:
            columns["task"] = pa.int16()
        if self._training and len(self._corpora) > 1:
            columns["corpus"] = pa.int16()
        if self._with_documents:
            columns["document"] = pa.int64()
        if not self._training:
            columns |= {"source_text": pa.string(), "target_text": pa.string()}
        return pa.schema(columns)

    def _clean(self, chunk: Chunk, encoded: EncodedChunk) -> Segments:
        """Return a chunk's segments that are kept, in a validation or test side all, and count them."""
        lengths = (encoded.source.lengths, encoded.target.lengths)
        cleaning, held_out = self._settings.cleaning, self._held_out if self._training else None
        reasons = examine(encoded.hashes, encoded.identical, lengths, cleaning, self._seen, held_out)
        if self._training:
            gone = left_out(reasons, cleaning)
        else:
            gone = {reason: np.zeros(len(chunk.lines), dtype=bool) for reason in reasons}
        keep = ~np.logical_or.reduce(list(gone.values()))
        if not self._training:
            self._held_out.add(encoded.hashes)
        count = self._counts[chunk.corpus]
        count.add(encoded, reasons, gone, keep)
        if count.altered and count.altered_line is None:
            count.altered_line = self._example(chunk, encoded, int((keep & encoded.altered).argmax()))
        self._alignment.check(chunk, encoded.suspicious)
        task = self._settings.directions.index(chunk.direction)
        segments = Segments(
            encoded.source,
            encoded.target,
            np.array(chunk.lines, dtype=np.int64),
            self._number_documents(chunk),
            np.full(len(chunk.lines), chunk.corpus, dtype=np.int16),
            np.full(len(chunk.lines), task, dtype=np.int16),
        ).only(keep)
        for side, pieces in (("source", segments.source), ("target", segments.target)):
            count.add_pieces(side, pieces, getattr(self._tokenizers, side).is_byte)
            self._used[side] += np.bincount(pieces.flat, minlength=len(self._used[side]))
        return segments

    def _example(self, chunk: Chunk, encoded: EncodedChunk, place: int) -> dict[str, Any]:
        """Return a target with the text that its pieces decode to."""
        end = int(encoded.target.lengths[: place + 1].sum())
        pieces = encoded.target.flat[end - int(encoded.target.lengths[place]) : end].tolist()
        back = self._tokenizers.target.decode(pieces)
        return {"line": chunk.lines[place], "text": chunk.targets[place], "back": back}

    def _number_documents(self, chunk: Chunk) -> np.ndarray:
        """Return the number of each pair's document, counted over the side; without documents, each pair is one."""
        begins = np.ones(len(chunk.lines), dtype=bool)
        if self._corpora[chunk.corpus].documents is not None:
            ids = [(chunk.corpus, document) for document in chunk.documents]
            begins[:] = list(map(ne, ids, [self._last, *ids]))
            self._last = ids[-1]
        numbers = self._documents + np.cumsum(begins, dtype=np.int64)
        self._documents = int(numbers[-1])
        return numbers

    def _batch(self, chunk: Chunk, encoded: EncodedChunk) -> pa.RecordBatch:
        rows = self._clean(chunk, encoded)
        if len(self._tags):
            rows = rows.with_tags(self._tags)
        if self._breaks:
            rows = rows.append(BREAK)
        columns = {
            "source": lists(rows.source),
            "target": lists(rows.target),
            "line": pa.array(rows.lines),
            "task": pa.array(rows.tasks),
            "corpus": pa.array(rows.corpora),
            "document": pa.array(rows.documents),
        }
        schema = self._schema()
        if not self._training:
            columns["source_text"] = pa.array(chunk.sources, pa.string())
            columns["target_text"] = pa.array(chunk.targets, pa.string())
        return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def _misaligned(corpus: Corpus, line: int, first: int, matched: int) -> DataError:
    """Return the error about `line` of a chunk from `first` on; lines after `matched` up to there were not checked."""
    names = dict.fromkeys(name_of(corpus, side) for side in ("source", "target"))
    unknown = first > matched + 1 and line < first + _NEAR
    where = f"somewhere between lines {matched:,} and {line:,}" if unknown else f"about line {line:,}"
    return DataError(
        f"{' and '.join(names)}: from {where} on, lines go better with their neighbour's translation than "
        "with their own; mend what is missing there, or take them as they are: data.cleaning.misaligned: true in the "
        "recipe, or mtkit prepare --keep-misaligned"
    )
