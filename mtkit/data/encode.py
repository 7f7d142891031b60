"""Segment pairs to pieces, chunk by chunk, by several processes; what comes out does not depend on how many."""

import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from mtkit.data.cleaning import pair_hashes
from mtkit.data.documents import Ragged
from mtkit.data.readers import SegmentPair, first_suspicious
from mtkit.data.tokenizer import Tokenizer, Tokenizers
from mtkit.errors import DataError

_PAIRS, _CHARACTERS = 10_000, 4_000_000
"""Segment pairs, and characters of them, that a chunk has at most: what is encoded, and written, at a time."""


class Progress(Protocol):
    """Goes through `items` and shows how far it is; `total` may be unknown."""

    def __call__(self, items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]: ...


def silent(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    """No progress shown."""
    return items


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Chunk(NamedTuple):
    """Segment pairs that stand together in one corpus."""

    corpus: int
    direction: str
    pairs: list[SegmentPair]
    aligned: int
    """How many of them, from the first, are looked at for sides that do not match."""


@dataclass(frozen=True)
class Encoded:
    """A chunk's pieces, and what else is found out about its pairs."""

    source: Ragged
    target: Ragged
    words: tuple[np.ndarray, np.ndarray]
    """Of each source and target, parted at spaces."""
    hashes: np.ndarray
    identical: np.ndarray
    """(pairs,) bool."""
    suspicious: int | None
    """Line of the input from where on the sides seem not to match."""


def chunks(pairs: Iterable[SegmentPair], corpus: int, direction: str, aligned: int) -> Iterator[Chunk]:
    """The pairs of a corpus in chunks, each small enough to be held."""
    held: list[SegmentPair] = []
    characters = 0
    for pair in pairs:
        held.append(pair)
        characters += len(pair.source) + len(pair.target)
        if len(held) == _PAIRS or characters >= _CHARACTERS:
            yield Chunk(corpus, direction, held, aligned)
            held, characters = [], 0
    if held:
        yield Chunk(corpus, direction, held, aligned)


def encode_chunk(chunk: Chunk, tokenizers: Tokenizers, threads: int = -1) -> Encoded:
    """The pieces of a chunk, without marks, by `threads` threads (-1: all processors)."""
    sources, targets = [pair.source for pair in chunk.pairs], [pair.target for pair in chunk.pairs]
    off = first_suspicious((pair.source, pair.target) for pair in chunk.pairs[: chunk.aligned])
    return Encoded(
        source=_ragged(tokenizers.source, sources, threads),
        target=_ragged(tokenizers.target, targets, threads),
        words=(_words(sources), _words(targets)),
        hashes=pair_hashes(chunk.direction, sources, targets),
        identical=np.array([source.strip() == target.strip() for _, source, target, _ in chunk.pairs]),
        suspicious=None if off is None else chunk.pairs[off - 1].line,
    )


class Encoder:
    """Encodes chunks with the tokenizers in `folder`; a context, since with `workers` above 1 it holds processes."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        self._folder = folder
        self._tokenizers = Tokenizers.load(folder)
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._workers > 1:
            # spawned, for a fork of a process with threads may hang; and the same on every system
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=get_context("spawn"),
                initializer=signal.signal,  # Ctrl-C reaches all processes; this one ends the others
                initargs=(signal.SIGINT, signal.SIG_IGN),
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def encode(self, parts: Iterable[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Each chunk with its pieces, in order; only a few are held at a time.

        Raises: DataError where a process was killed.
        """
        if self._pool is None:
            for chunk in parts:
                yield chunk, encode_chunk(chunk, self._tokenizers)
            return
        waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
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


def _work(folder: Path, chunk: Chunk) -> Encoded:
    return encode_chunk(chunk, _loaded(folder), threads=1)


@cache
def _loaded(folder: Path) -> Tokenizers:
    return Tokenizers.load(folder)


def _ragged(tokenizer: Tokenizer, texts: list[str], threads: int) -> Ragged:
    pieces = tokenizer.encode_lines(texts, threads)
    lengths = np.array([len(each) for each in pieces], dtype=np.int32)
    return Ragged(np.fromiter(chain.from_iterable(pieces), dtype=np.int32, count=int(lengths.sum())), lengths)


def _words(texts: list[str]) -> np.ndarray:
    return np.array([len(text.split()) for text in texts], dtype=np.int32)
