"""A part of the training text, encoded but not cleaned yet, in shards: so a killed `prepare` goes on, and parts join.

Cleaning looks for what came before, so it goes over all shards in order, when all of them are there.

tokenizer/        the one that encoded them
shard-1.arrow     a record batch and a fingerprint for each chunk of text; it appears when it is complete
part.json         what the part is made of, and how many pairs and shards it has once it is finished
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic_core import from_json
from typing_extensions import TypedDict

from mtkit.data.borrowed import vocabulary_of
from mtkit.data.chunks import Chunk, FilePart, SideText
from mtkit.data.encode import EncodedChunk, Encoder
from mtkit.data.sides import SideAlignment
from mtkit.errors import DataError, MtkitError
from mtkit.recipe.data import DataSettings
from mtkit.storage.files import inside, json_text, locked, write_json, writing
from mtkit.storage.records import Count, read_stored
from mtkit.terminal import ProgressBar, silent
from mtkit.text.readers import name_of
from mtkit.text.segments import Ragged, lists

PAIRS = 1_000_000
"""Segment pairs of a shard, about: at most so many are encoded once more after a kill."""

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

    def __init__(self, folder: Path, part: FilePart, about: Mapping[str, Any]) -> None:
        """`about` are the JSON values of all that decides what is encoded, but for the tokenizer itself."""
        self.folder, self.part = folder, part
        self._about = json.loads(json_text(about))

    @property
    def tokenizer(self) -> Path:
        """The folder of its tokenizer."""
        return inside(self.folder, "tokenizer")

    @property
    def record(self) -> ShardsRecord:
        """Content of part.json; one that tells of nothing where there is none that can be read."""
        try:
            return read_stored(self.folder / "part.json", ShardsRecord, "prepare that part again")
        except MtkitError:
            return ShardsRecord(part=None, about={}, tokenizer=None, pairs=None, shards=0)

    @property
    def complete(self) -> int:
        """How many of its shards are whole."""
        return sum(1 for _ in self.folder.glob("shard-*.arrow"))

    @property
    def finished(self) -> bool:
        """Whether all of it was written and is there."""
        found = self.record
        return found["pairs"] is not None and all(
            self._path(number).is_file() for number in range(1, found["shards"] + 1)
        )

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Keeps the folder to this process; what stands in it and is of other text or settings is removed.

        Raises: DataError where it holds anything else; MtkitError where another process has it.
        """
        found = self.record
        if self.folder.exists() and found["part"] is None and any(self.folder.iterdir()):
            raise DataError(f"{self.folder} exists and is no part of prepared data; move it away")
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(inside(self.folder, "lock"), f"{self.folder} is being written by another process; let it end"):
            if (found["part"], found["about"]) != (str(self.part), self._about):
                for each in self.folder.glob("shard-*.arrow"):
                    each.unlink()
                shutil.rmtree(self.tokenizer, ignore_errors=True)
            self._write_record(None, 0)
            yield

    def write(self, settings: DataSettings, text: SideText, encoder: Encoder, progress: ProgressBar = silent) -> None:
        """Encode the part of the training text; whole shards that were made of the same are not made again.

        All text is one part too: then `text.facts` tell what was read. Raises: DataError where the sides seem not to
        match.
        """
        while not self._written(settings, text, encoder, progress):
            pass  # a shard was of other text, and went

    def _written(self, settings: DataSettings, text: SideText, encoder: Encoder, progress: ProgressBar) -> bool:
        """Whether all shards stand; one of other text is removed, and what came before it stays."""
        chunks = text.chunks(progress) if self.part.of == 1 else text.chunks_of(self.part, progress)
        alignment, tokenizer = SideAlignment(text.corpora, settings), vocabulary_of(self.tokenizer)
        number, count = 0, 0
        for number, some in groupby(_numbered(chunks), key=lambda each: each[0]):
            path, own = self._path(number), (chunk for _, chunk in some)
            made_of = json_text([self._about, tokenizer, str(self.part), number, PAIRS])
            key = {b"mtkit": hashlib.sha256(made_of.encode()).hexdigest().encode()}
            if (known := _made_of(path, key)) is not None:
                for chunk, fingerprint in zip_longest(own, known):
                    if chunk is None or chunk.fingerprint != fingerprint:
                        path.unlink()
                        return False
                    count += len(chunk.lines)
                    alignment.check(chunk, None)
                continue
            schema = _SCHEMA.with_metadata(key)
            with (
                writing(path) as temporary,
                pa.OSFile(str(temporary), "wb") as file,
                pa.ipc.new_stream(file, schema) as writer,
            ):
                for chunk, encoded in encoder.encode(own):
                    count += len(chunk.lines)
                    alignment.check(chunk, encoded.suspicious)
                    writer.write_batch(*_packed(chunk, encoded, schema))
        self._write_record(count, number)
        return True

    def read(self) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """The chunks of a finished part, in order, without texts but those of altered targets.

        Raises: DataError where one is damaged.
        """
        for path in self._paths():
            for batch, about in _batches(path):
                yield _unpacked(batch, about)

    def fingerprints(self) -> Iterator[str]:
        """Those of the chunks that a finished part was made of. Raises: DataError where a shard is damaged."""
        for path in self._paths():
            yield from _fingerprints(path)

    def hashes(self) -> Iterator[np.ndarray]:
        """Those of a finished part's pairs, a chunk at a time."""
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
    """Chunks, each with the number of its shard."""
    before = 0
    for chunk in chunks:
        yield before // PAIRS + 1, chunk
        before += len(chunk.lines)


def check_joined(parts: Sequence[Shards], text: SideText, progress: ProgressBar = silent) -> None:
    """Read all the text, so that `text.facts` are known. Raises: DataError where a part was made of other text."""
    chunks = text.chunks(progress, "checking")
    for each in parts:
        for fingerprint in each.fingerprints():
            chunk = next(chunks, None)
            if chunk is None or chunk.fingerprint != fingerprint:
                raise DataError(
                    f"part {each.part} was prepared from other text; prepare it again with --part {each.part}"
                )
    if chunk := next(chunks, None):
        raise DataError(
            f"{name_of(text.corpora[chunk.corpus])} goes on after line {chunk.lines[0] - 1:,}, where its parts end; "
            "prepare them again"
        )


def _metadata(path: Path) -> dict[bytes, bytes] | None:
    """What a shard is made of; None where it cannot be read."""
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            found: dict[bytes, bytes] | None = reader.schema.metadata
            return found
    except (OSError, pa.ArrowException):
        return None


def _batches(path: Path) -> Iterator[tuple[pa.RecordBatch, dict[str, Any]]]:
    """The batches of a shard, each with what is said of its chunk. Raises: DataError where it is damaged."""
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
    """The fingerprints of its chunks, where there is a whole shard that says `key` of itself."""
    if not path.is_file() or _metadata(path) != key:
        return None
    try:
        return list(_fingerprints(path))
    except DataError:  # damaged: it is made again
        return None


def _fingerprints(path: Path) -> Iterator[str]:
    """Those of the chunks that a shard was made of."""
    for _, about in _batches(path):
        yield about["fingerprint"]


def _packed(chunk: Chunk, encoded: EncodedChunk, schema: pa.Schema) -> tuple[pa.RecordBatch, dict[str, str]]:
    texts = [text if gone else None for text, gone in zip(chunk.targets, encoded.altered.tolist(), strict=True)]
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
    named = any(each is not None for each in chunk.documents)
    about = {
        "corpus": chunk.corpus,
        "direction": chunk.direction,
        "aligned": chunk.aligned,
        "suspicious": encoded.suspicious,
        "sentences": encoded.sentences.tolist(),
        "fingerprint": chunk.fingerprint,
        "documents": chunk.documents if named else None,
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
