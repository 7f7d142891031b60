"""Segment pairs to pieces, chunk by chunk, by several processes; what comes out does not depend on how many."""

import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing import parent_process
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Self

import numpy as np

from mtkit.data.cleaning import pair_hashes
from mtkit.data.lines.chunks import Chunk
from mtkit.data.lines.sentences import sentences
from mtkit.data.readers import first_suspicious
from mtkit.data.segments import Ragged
from mtkit.data.tokenizer import Tokenizer, Tokenizers
from mtkit.errors import DataError
from mtkit.languages import languages_of

_SAMPLE = 1_000
"""Pairs of a chunk whose sentences are counted: a share of them says enough, and takes less time."""


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk's pieces, and what else is found out about its pairs."""

    source: Ragged
    target: Ragged
    words: tuple[np.ndarray, np.ndarray]
    """Words per source and per target, split at spaces."""
    sentences: np.ndarray
    """Sentences per source, of the sources that `sampled` selects."""
    hashes: np.ndarray
    identical: np.ndarray
    """(pairs,) bool: both sides are the same."""
    altered: np.ndarray
    """(pairs,) bool: targets that do not come back from their pieces."""
    suspicious: int | None
    """Line of the input from where on the sides seem not to match."""


def encode_chunk(chunk: Chunk, tokenizers: Tokenizers, threads: int = -1) -> EncodedChunk:
    """The pieces of a chunk, without marks, by `threads` threads (-1: all processors)."""
    off = first_suspicious(zip(chunk.sources[: chunk.aligned], chunk.targets[: chunk.aligned], strict=True))
    cut = tokenizers.target.encode_lines(chunk.targets, threads)
    altered = tokenizers.target.altered(chunk.targets, cut, threads)
    target = _ragged(cut)
    del cut  # lists by the thousand, which slow down those to come
    source = _ragged(tokenizers.source.encode_lines(chunk.sources, threads))
    same = (one.strip() == other.strip() for one, other in zip(chunk.sources, chunk.targets, strict=True))
    language, chosen = languages_of(chunk.direction)[0], chunk.sources[sampled(len(chunk.lines))]
    return EncodedChunk(
        source,
        target,
        words=(_words(source, tokenizers.source), _words(target, tokenizers.target)),
        sentences=np.array([len(sentences(text, language)) for text in chosen], np.int32),
        hashes=pair_hashes(chunk.direction, source, target, chunk.sources, chunk.targets),
        identical=np.fromiter(same, dtype=bool, count=len(chunk.lines)),
        altered=np.array(altered, dtype=bool),
        suspicious=None if off is None else chunk.lines[off - 1],
    )


def sampled(pairs: int) -> slice:
    """Those of so many pairs whose sentences are counted: `_SAMPLE` of a chunk, evenly spread, or all."""
    return slice(None, None, -(-pairs // _SAMPLE) or None)


class Encoder:
    """Encodes chunks with the tokenizers in `folder`; a context, since with `workers` above 1 it holds processes."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        self._folder = folder
        self.tokenizers = Tokenizers.load(folder)
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._workers > 1:
            # spawned, for a fork of a process with threads may hang; and the same on every system
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=_Context(),
                initializer=_begin,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encode(self, parts: Iterable[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Each chunk with its pieces, in order; only a few are held at a time.

        Raises: DataError where a process was killed.
        """
        if self._pool is None:
            for chunk in parts:
                yield chunk, encode_chunk(chunk, self.tokenizers)
            return
        waiting: deque[tuple[Chunk, Future[EncodedChunk]]] = deque()
        try:
            for chunk in parts:
                waiting.append((chunk, self._pool.submit(_work, self._folder, chunk)))
                if len(waiting) > 2 * self._workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool as error:
            raise DataError("a process that encodes text was killed; run the command again, or with --workers 1") from (
                error
            )


class _Process(SpawnProcess):
    """A process that does not run the main script again, which Python does unless a script guards itself against it."""

    def start(self) -> None:
        """Start it."""
        with _main_hidden():
            super().start()


class _Context(SpawnContext):
    """Starts such processes."""

    Process = _Process


_HIDING = Lock()


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Inside, nothing says where the main script lies: a process that is started then cannot run it.

    Nothing of it is needed there, for what such a process computes with is in this package. Other threads see the main
    module without its file for a moment: such a thread should not start processes of its own then.
    """
    with _HIDING:
        main = vars(sys.modules["__main__"])
        kept: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
        main.pop("__file__", None)
        main["__spec__"] = None
        try:
            yield
        finally:
            main.update(kept)


def _begin() -> None:
    """The first thing that a process of the pool does: Ctrl-C, which reaches all, is left to the one that ends these.

    Killed, that one ends nobody; then each ends itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(folder: Path, chunk: Chunk) -> EncodedChunk:
    return encode_chunk(chunk, _loaded(folder), threads=1)


@cache
def _loaded(folder: Path) -> Tokenizers:
    return Tokenizers.load(folder)


def _ragged(rows: list[list[int]]) -> Ragged:
    lengths = np.fromiter(map(len, rows), dtype=np.int32, count=len(rows))
    return Ragged(np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum())), lengths)


def _words(side: Ragged, tokenizer: Tokenizer) -> np.ndarray:
    """The words of each row: pieces that begin with a space."""
    before = np.concatenate([np.zeros(1, np.int32), np.cumsum(tokenizer.begins_word[side.flat], dtype=np.int32)])
    ends = np.cumsum(side.lengths, dtype=np.int64)
    return before[ends] - before[ends - side.lengths]
