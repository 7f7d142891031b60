"""Encoding of segment pairs, chunk by chunk, by several processes; the result does not depend on their number."""

import os
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue
from typing import Self

import numpy as np

from mtkit.data.chunks import Chunk, SideText
from mtkit.data.cleaning import pair_hashes
from mtkit.errors import DataError
from mtkit.text.characters import is_blank
from mtkit.text.languages import languages_of
from mtkit.text.misaligned import first_suspicious
from mtkit.text.segments import Ragged
from mtkit.text.sentences import sentences
from mtkit.text.tokenizer import UNK, Tokenizer, Tokenizers

_ONE_PROCESS = 20_000
"""Maximum segments for which one process is faster than starting several."""

_SAMPLE = 1_000
"""Pairs of a chunk whose sentences are counted: a sample suffices and takes less time."""


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encoding_processes(texts: Iterable[SideText], workers: int) -> int:
    """Return the number of processes that encode the texts fastest: one for few segments, otherwise `workers`."""
    return 1 if sum(text.pairs or sys.maxsize for text in texts) <= _ONE_PROCESS else workers


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk's pieces, and measurements of its pairs."""

    source: Ragged
    target: Ragged
    words: tuple[np.ndarray, np.ndarray]
    """Words per source and per target, split at spaces."""
    sentences: np.ndarray
    """Sentences per source that `sampled` selects."""
    hashes: np.ndarray
    identical: np.ndarray
    """(pairs,) bool: both sides are the same."""
    altered: np.ndarray
    """(pairs,) bool: targets that decoding their pieces does not restore."""
    suspicious: int | None
    """Line of the input from which on the sides seem not to match."""


def encode_chunk(chunk: Chunk, tokenizers: Tokenizers, threads: int = -1) -> EncodedChunk:
    """Encode a chunk, without tags and breaks, with `threads` threads (-1: one per processor core).

    Lines that show nothing, such as a zero-width space, have no pieces: training leaves their pairs out as empty.
    """
    suspicious = first_suspicious(zip(chunk.sources[: chunk.aligned], chunk.targets[: chunk.aligned], strict=True))
    sources, targets = (["" if is_blank(line) else line for line in side] for side in (chunk.sources, chunk.targets))
    pieces = tokenizers.target.encode_lines(targets, threads)
    altered = tokenizers.target.altered(targets, pieces, threads)
    target = _ragged(pieces)
    del pieces  # thousands of lists slow down the allocation of others
    source = _ragged(tokenizers.source.encode_lines(sources, threads))
    same = (text.strip() == other.strip() for text, other in zip(chunk.sources, chunk.targets, strict=True))
    language, sample = languages_of(chunk.direction)[0], chunk.sources[sampled(len(chunk.lines))]
    return EncodedChunk(
        source,
        target,
        words=(_words(source, tokenizers.source, sources), _words(target, tokenizers.target, targets)),
        sentences=np.array([len(sentences(text, language)) for text in sample], np.int32),
        hashes=pair_hashes(chunk.direction, source, target, chunk.sources, chunk.targets),
        identical=np.fromiter(same, dtype=bool, count=len(chunk.lines)),
        altered=np.array(altered, dtype=bool),
        suspicious=None if suspicious is None else chunk.lines[suspicious - 1],
    )


def sampled(pairs: int) -> slice:
    """Return the pairs whose sentences are counted: `_SAMPLE` of a chunk, evenly spread, or all."""
    return slice(None, None, -(-pairs // _SAMPLE) or None)


class Encoder:
    """Encodes chunks with the tokenizers in `folder`; a context manager, which ends its `workers` processes."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        self.tokenizers = Tokenizers.load(folder)
        self._workers = workers
        self._processes = [_Process(folder) for _ in range(workers)] if workers > 1 else []
        self._idle: LifoQueue[_Process] = LifoQueue()  # last in, first out: it is already running
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._processes:
            self._threads = ThreadPoolExecutor(self._workers)  # each thread waits for one process
            for process in self._processes:
                self._idle.put(process)
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            for process in self._processes:
                process.end()

    def encode(self, parts: Iterable[Chunk]) -> Iterator[tuple[Chunk, EncodedChunk]]:
        """Yield each chunk with its pieces, in order; only a few are in memory. Raises: DataError if a process died."""
        if self._threads is None:
            for chunk in parts:
                yield chunk, encode_chunk(chunk, self.tokenizers)
            return
        waiting: deque[tuple[Chunk, Future[EncodedChunk]]] = deque()
        for chunk in parts:
            waiting.append((chunk, self._threads.submit(self._encode, chunk)))
            if len(waiting) > 2 * self._workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()

    def _encode(self, chunk: Chunk) -> EncodedChunk:
        process = self._idle.get()
        try:
            answer = process.answer(chunk)
        except (EOFError, OSError) as error:
            raise DataError("a process that encodes text was killed; run the command again, or with --workers 1") from (
                error
            )
        finally:
            self._idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Process:
    """A Python process that encodes one chunk at a time; it starts with the first.

    Its connection ends with it, so nothing waits for the answer of a killed process. It is not forked, since a fork of
    a process with threads may hang, and it does not run the main script again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: tuple[subprocess.Popen[bytes], Connection] | None = None

    def answer(self, chunk: Chunk) -> EncodedChunk | Exception:
        """Return the encoded chunk, or the error. Raises: EOFError or OSError if the process was killed."""
        if self._started is None:
            self._started = self._start()
        _, connection = self._started
        connection.send(chunk)
        answer: EncodedChunk | Exception = connection.recv()
        return answer

    def end(self) -> None:
        """Kill the process, which writes nothing."""
        if self._started is not None:
            process, connection = self._started
            process.kill()
            process.wait()
            connection.close()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        connection, remote = Pipe()
        with remote:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _ANSWER_ALL, str(remote.fileno()), str(self._folder)],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote.fileno()],
                # in another session, Ctrl-C does not reach it from its start on
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )
        return process, connection


_ANSWER_ALL = "from mtkit.data.encode import answer_all; answer_all()"


def answer_all() -> None:
    """Encode chunks in such a process until the other end of its connection is closed, as when its parent is killed."""
    connection, folder = Connection(int(sys.argv[1])), Path(sys.argv[2])
    with suppress(EOFError, OSError):
        while True:
            chunk = connection.recv()
            answer: EncodedChunk | Exception
            try:
                answer = encode_chunk(chunk, _load(folder), threads=1)
            except Exception as error:
                error.add_note(traceback.format_exc())  # the traceback itself cannot be sent
                answer = error
            connection.send(answer)


@cache
def _load(folder: Path) -> Tokenizers:
    return Tokenizers.load(folder)


def _ragged(rows: list[list[int]]) -> Ragged:
    lengths = np.fromiter(map(len, rows), dtype=np.int32, count=len(rows))
    return Ragged(np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum())), lengths)


def _words(side: Ragged, tokenizer: Tokenizer, lines: Sequence[str]) -> np.ndarray:
    """Count the words of each row: pieces that begin with a space, and bytes that spell one.

    In rows with an unknown piece, which may be several words, the words of the line are counted.
    """
    begins = tokenizer.begins_word[side.flat]
    begins[tokenizer.space_bytes(side.flat)] = True
    counts = side.sums(begins.astype(np.int32))
    for row in np.flatnonzero(side.sums((side.flat == UNK).astype(np.int32))).tolist():
        counts[row] = tokenizer.count_words(lines[row])
    return counts
