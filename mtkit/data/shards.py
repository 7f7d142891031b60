"""A part of the training text, encoded but not cleaned yet, in shards: so a killed `prepare` goes on, and parts join.

Cleaning looks for what came before, so it goes over all shards in order, when all of them are there.

tokenizer/        the one that encoded them
shard-1.arrow     a record batch for each chunk of text, and what the shard is made of; it appears when it is complete
part.json         what the part is made of, and how many pairs and shards it has once it is finished
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mtkit.data.borrowed import vocabulary_of
from mtkit.data.encode import Chunk, EncodedChunk, Encoder
from mtkit.data.lines.parts import FilePart
from mtkit.data.progress import ProgressBar, silent
from mtkit.data.segments import Ragged, lists
from mtkit.data.sides import SideAlignment, side_chunks
from mtkit.errors import DataError
from mtkit.files import json_text, locked, write_json, writing
from mtkit.recipe.data import DataSettings

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


class Shards:
    """The shards of one part, in a folder of their own."""

    def __init__(self, folder: Path, part: FilePart, about: Mapping[str, Any]) -> None:
        """`about` are the JSON values of all that decides what is encoded, but for the tokenizer itself."""
        self.folder, self.part = folder, part
        self._about = json.loads(json_text(about))

    @property
    def tokenizer(self) -> Path:
        """The folder of its tokenizer."""
        return self.folder / "tokenizer"

    @property
    def record(self) -> dict[str, Any]:
        """Content of part.json; one that tells of nothing where there is none that can be read."""
        nothing: dict[str, Any] = {"part": None, "about": {}, "tokenizer": None, "pairs": None, "shards": 0}
        try:
            found = json.loads((self.folder / "part.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return nothing
        return found if isinstance(found, dict) and found.keys() == nothing.keys() else nothing

    @property
    def finished(self) -> bool:
        """Whether all of just this part is there."""
        found = self.record
        return (
            (found["part"], found["about"]) == (str(self.part), self._about)
            and found["pairs"] is not None
            and all(self._path(number).is_file() for number in range(1, found["shards"] + 1))
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
        with locked(self.folder / "lock", f"{self.folder} is being written by another process; let it end"):
            if (found["part"], found["about"]) != (str(self.part), self._about):
                for each in self.folder.glob("shard-*.arrow"):
                    each.unlink()
                shutil.rmtree(self.tokenizer, ignore_errors=True)
            self._write_record(None, 0)
            yield

    def write(
        self, settings: DataSettings, lines: Sequence[int], encoder: Encoder, progress: ProgressBar = silent
    ) -> None:
        """Encode the part of the training text, which has so many lines a corpus; whole shards are not made again.

        Raises: DataError where the sides seem not to match.
        """
        corpora, pairs = settings.train, sum(lines)
        directions = [settings.direction_of(corpus) for corpus in corpora]
        chunks, alignment = side_chunks("train", corpora, directions, lines, progress), SideAlignment(corpora, settings)
        number, count = 0, 0
        tokenizer = vocabulary_of(self.tokenizer)
        for number, some in groupby(self._own(chunks, pairs), key=lambda each: each[0]):
            path = self._path(number)
            made_of = json_text([self._about, tokenizer, str(self.part), number, PAIRS])
            key = {b"mtkit": hashlib.sha256(made_of.encode()).hexdigest().encode()}
            own = (chunk for _, chunk in some)
            if path.is_file() and _metadata(path) == key:
                for chunk in own:
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

    def read(self) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """The chunks of a finished part, in order, without texts but those of altered targets.

        Raises: DataError where one is damaged.
        """
        for number in range(1, self.record["shards"] + 1):
            path = self._path(number)
            try:
                # not mapped: the pages of a whole shard would count as memory of this process
                with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
                    while True:
                        try:
                            batch, about = reader.read_next_batch_with_custom_metadata()
                        except StopIteration:
                            break
                        yield _unpacked(batch, json.loads(about[b"chunk"]))
            except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} is damaged; remove it and prepare part {self.part} again") from error

    def _own(self, chunks: Iterable[Chunk], pairs: int) -> Iterator[tuple[int, Chunk]]:
        """The chunks that begin in this part's share of the pairs, each with the number of its shard."""
        before, begin = 0, -(-pairs * (self.part.number - 1) // self.part.of)
        for chunk in chunks:
            place = before * self.part.of // pairs + 1
            if place > self.part.number:
                return
            if place == self.part.number:
                yield (before - begin) // PAIRS + 1, chunk
            before += len(chunk.lines)

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number}.arrow"

    def _write_record(self, pairs: int | None, shards: int) -> None:
        tokenizer = None if pairs is None else vocabulary_of(self.tokenizer)
        write_json(
            self.folder / "part.json",
            {"part": str(self.part), "about": self._about, "tokenizer": tokenizer, "pairs": pairs, "shards": shards},
        )


def _metadata(path: Path) -> dict[bytes, bytes] | None:
    """What a shard is made of; None where it cannot be read."""
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
            found: dict[bytes, bytes] | None = reader.schema.metadata
            return found
    except (OSError, pa.ArrowException):
        return None


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
