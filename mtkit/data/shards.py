"""A part of the training text, encoded but not cleaned, in shards: a killed `prepare` resumes, and parts can be joined.

Cleaning compares each pair with all before it, so it reads all shards in order when all of them exist.

tokenizer/        the tokenizer of all shards
shard-1.arrow     a record batch and a fingerprint for each chunk of text; it appears when it is complete
part.json         what the part is made of, and its numbers of pairs and shards when it is finished

`mtkit.storage.jobs` names the parts and finds them. Its journal does not fit: a shard is too large to hold, is checked
chunk by chunk while it is skipped, and stays valid if the text of an earlier one changes.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pydantic_core import from_json
from typing_extensions import TypedDict

from mtkit.data.chunks import Chunk, SideText
from mtkit.data.encode import EncodedChunk, Encoder
from mtkit.data.sides import SideAlignment
from mtkit.data.vocabulary import vocabulary_of
from mtkit.errors import DataError, MtkitError
from mtkit.recipe.data import DataSettings
from mtkit.storage.files import inside, json_text, locked, write_json, writing
from mtkit.storage.jobs import Part
from mtkit.storage.records import Count, read_stored
from mtkit.terminal import ProgressBar, silent
from mtkit.text.corpora import name_of
from mtkit.text.segments import Ragged, lists

PAIRS = 1_000_000
"""Segment pairs of a shard, about; a kill loses the encoding of one shard."""

_SCHEMA = pa.schema(
    {
        "source": pa.list_(pa.int32()),
        "target": pa.list_(pa.int32()),
        "line": pa.int64(),
        "source_words": pa.int32(),
        "target_words": pa.int32(),
        "hash": pa.uint64(),
        "identical": pa.bool_(),
        "altered": pa.bool_(),
        "altered_text": pa.string(),
    }
)


class ShardsRecord(TypedDict):
    """Content of part.json."""

    part: str | None
    about: dict[str, Any]
    tokenizer: str | None
    pairs: Count | None
    shards: Count


class Shards:
    """The shards of one part, in a folder of their own."""

    def __init__(self, folder: Path, part: Part, about: Mapping[str, Any]) -> None:
        """`about` are the JSON values of all that the shards depend on, except the tokenizer itself."""
        self.folder, self.part = folder, part
        self._about = json.loads(json_text(about))

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return inside(self.folder, "tokenizer")

    @property
    def record(self) -> ShardsRecord:
        """Content of part.json; a record of no part if it cannot be read."""
        try:
            return read_stored(self.folder / "part.json", ShardsRecord, "prepare that part again")
        except MtkitError:
            return ShardsRecord(part=None, about={}, tokenizer=None, pairs=None, shards=0)

    @property
    def complete(self) -> int:
        """The number of complete shards."""
        return sum(1 for _ in self.folder.glob("shard-*.arrow"))

    @property
    def finished(self) -> bool:
        """Whether all shards were written and exist."""
        return self.record["pairs"] is not None and all(path.is_file() for path in self._paths())

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Lock the folder; shards and a tokenizer of other text or settings are removed.

        Raises: DataError if it contains anything else; MtkitError if another process has locked it.
        """
        record = self.record
        if self.folder.exists() and record["part"] is None and any(self.folder.iterdir()):
            raise DataError(f"{self.folder} exists and is no part of prepared data; move it away")
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(inside(self.folder, "lock"), f"{self.folder} is being written by another process; let it end"):
            if (record["part"], record["about"]) != (str(self.part), self._about):
                for shard in self.folder.glob("shard-*.arrow"):
                    shard.unlink()
                shutil.rmtree(self.tokenizer, ignore_errors=True)
            self._write_record(None, 0)
            yield

    def write(self, settings: DataSettings, text: SideText, encoder: Encoder, progress: ProgressBar = silent) -> None:
        """Encode the part of the training text; complete shards of the same text are kept.

        If the part is all of the text, `text.facts` are available afterwards. Raises: DataError if the sides seem
        misaligned.
        """
        while not self._write_once(settings, text, encoder, progress):
            pass  # a shard was of other text and has been removed

    def _write_once(self, settings: DataSettings, text: SideText, encoder: Encoder, progress: ProgressBar) -> bool:
        """Whether all shards are written; False after removing one of other text, which must be read again."""
        chunks = text.chunks(progress) if self.part.of == 1 else text.chunks_of(self.part, progress)
        alignment, tokenizer = SideAlignment(text.corpora, settings), vocabulary_of(self.tokenizer)
        number, pairs = 0, 0
        for number, group in groupby(_numbered(chunks), key=lambda numbered: numbered[0]):
            path, shard_chunks = self._path(number), (chunk for _, chunk in group)
            made_of = json_text([self._about, tokenizer, str(self.part), number, PAIRS])
            key = {b"mtkit": hashlib.sha256(made_of.encode()).hexdigest().encode()}
            if (fingerprints := _made_of(path, key)) is not None:
                for chunk, fingerprint in zip_longest(shard_chunks, fingerprints):
                    if chunk is None or chunk.fingerprint != fingerprint:
                        path.unlink()
                        return False
                    pairs += len(chunk.lines)
                    alignment.check(chunk, None)
                continue
            schema = _SCHEMA.with_metadata(key)
            with (
                writing(path) as temporary,
                pa.OSFile(str(temporary), "wb") as file,
                pa.ipc.new_stream(file, schema) as writer,
            ):
                for chunk, encoded in encoder.encode(shard_chunks):
                    pairs += len(chunk.lines)
                    alignment.check(chunk, encoded.suspicious)
                    writer.write_batch(*_packed(chunk, encoded, schema))
        self._write_record(pairs, number)
        return True

    def read(self) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """The chunks of a finished part, in order; of the texts, only altered targets.

        Raises: DataError for a damaged shard.
        """
        for path in self._paths():
            for batch, about in _batches(path):
                yield _unpacked(batch, about)

    def fingerprints(self) -> Iterator[str]:
        """The chunk fingerprints of a finished part. Raises: DataError for a damaged shard."""
        for path in self._paths():
            for _, about in _batches(path):
                yield about["fingerprint"]

    def hashes(self) -> Iterator[np.ndarray]:
        """The pairs' hashes of a finished part, chunk by chunk."""
        for path in self._paths():
            # mapped, so that no other column is read
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
                yield from (batch["hash"].to_numpy() for batch in reader)

    def _paths(self) -> list[Path]:
        return [self._path(number) for number in range(1, self.record["shards"] + 1)]

    def _path(self, number: int) -> Path:
        return inside(self.folder, f"shard-{number}.arrow")

    def _write_record(self, pairs: int | None, shards: int) -> None:
        tokenizer = None if pairs is None else vocabulary_of(self.tokenizer)
        write_json(
            inside(self.folder, "part.json"),
            {"part": str(self.part), "about": self._about, "tokenizer": tokenizer, "pairs": pairs, "shards": shards},
        )


def _numbered(chunks: Iterable[Chunk]) -> Iterator[tuple[int, Chunk]]:
    """The chunks, each with the number of its shard."""
    pairs = 0
    for chunk in chunks:
        yield pairs // PAIRS + 1, chunk
        pairs += len(chunk.lines)


def check_joined(parts: Sequence[Shards], text: SideText, progress: ProgressBar = silent) -> None:
    """Read all the text, after which `text.facts` are available. Raises: DataError for a part of other text."""
    chunks = text.chunks(progress, "checking")
    for shards in parts:
        for fingerprint in shards.fingerprints():
            chunk = next(chunks, None)
            if chunk is None or chunk.fingerprint != fingerprint:
                part = shards.part
                raise DataError(f"part {part} was prepared from other text; prepare it again with --part {part}")
    if chunk := next(chunks, None):
        raise DataError(
            f"{name_of(text.corpora[chunk.corpus])} continues after line {chunk.lines[0] - 1:,}, the last line of its "
            "parts; prepare them again"
        )


def _metadata(path: Path) -> dict[bytes, bytes] | None:
    """The metadata of a shard; None if it cannot be read."""
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            return cast("dict[bytes, bytes] | None", reader.schema.metadata)
    except (OSError, pa.ArrowException):
        return None


def _batches(path: Path) -> Iterator[tuple[pa.RecordBatch, dict[str, Any]]]:
    """The batches of a shard, each with the metadata of its chunk. Raises: DataError if it is damaged."""
    try:
        # not mapped: the pages of a whole shard would count as memory of this process
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            while True:
                try:
                    batch, about = reader.read_next_batch_with_custom_metadata()
                except StopIteration:
                    break
                yield batch, from_json(about[b"chunk"])
    except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged; remove it and prepare its part again") from error


def _made_of(path: Path, key: dict[bytes, bytes]) -> list[str] | None:
    """The chunk fingerprints in a complete shard with the metadata `key`; None if there is none."""
    if not path.is_file() or _metadata(path) != key:
        return None
    try:
        return [about["fingerprint"] for _, about in _batches(path)]
    except DataError:  # damaged: it is made again
        return None


def _packed(chunk: Chunk, encoded: EncodedChunk, schema: pa.Schema) -> tuple[pa.RecordBatch, dict[str, str]]:
    texts = [text if altered else None for text, altered in zip(chunk.targets, encoded.altered.tolist(), strict=True)]
    columns = [
        lists(encoded.source),
        lists(encoded.target),
        pa.array(chunk.lines, pa.int64()),
        *(pa.array(words, pa.int32()) for words in encoded.words),
        pa.array(encoded.hashes),
        pa.array(encoded.identical),
        pa.array(encoded.altered),
        pa.array(texts, pa.string()),
    ]
    in_documents = any(document is not None for document in chunk.documents)
    about = {
        "corpus": chunk.corpus,
        "direction": chunk.direction,
        "aligned": chunk.aligned,
        "suspicious": encoded.suspicious,
        "sentences": encoded.sentences.tolist(),
        "fingerprint": chunk.fingerprint,
        "documents": chunk.documents if in_documents else None,
    }
    return pa.record_batch(columns, schema=schema), {"chunk": json_text(about)}


def _unpacked(batch: pa.RecordBatch, about: dict[str, Any]) -> tuple[Chunk, EncodedChunk]:
    lines = batch["line"].to_pylist()
    chunk = Chunk(
        about["corpus"],
        about["direction"],
        lines,
        [],
        [text or "" for text in batch["altered_text"].to_pylist()],
        about["documents"] or [None] * len(lines),
        about["aligned"],
    )
    source, target = (
        Ragged(side.flatten().to_numpy(), np.diff(side.offsets.to_numpy()).astype(np.int32, copy=False))
        for side in (batch["source"], batch["target"])
    )
    encoded = EncodedChunk(
        source,
        target,
        words=(batch["source_words"].to_numpy(), batch["target_words"].to_numpy()),
        sentences=np.array(about["sentences"], dtype=np.int32),
        hashes=batch["hash"].to_numpy(),
        identical=batch["identical"].to_numpy(zero_copy_only=False),
        altered=batch["altered"].to_numpy(zero_copy_only=False),
        suspicious=about["suspicious"],
    )
    return chunk, encoded
