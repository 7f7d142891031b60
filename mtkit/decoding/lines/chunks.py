"""Chunks of lines: of at most a size, or of the lines that have arrived from a writer who waits for answers."""

from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from threading import Thread

from mtkit.storage.jobs import Chunk, Item

CHUNK = 10_000
"""Maximum items of a chunk; a kill loses the work on one."""

CHARACTERS = 1 << 20
"""Characters at which a chunk ends."""

LONGEST_CHUNK = 4 * CHUNK
"""Maximum items of a chunk longer than `CHUNK`, because they belong together; a live one may have more."""

Together = Callable[[Item, Item], bool]
"""Whether an item and the next belong together, so that no chunk should end between them.

An item that does not belong together with a copy of itself, such as a blank line, belongs to no other."""


def chunks_of(items: Iterable[Item], together: Together | None = None, size: int | None = None) -> Iterator[Chunk]:
    """Chunks of at most `size` items; None: `CHUNK`."""
    iterator, first = iter(items), 0
    most = CHUNK if size is None else size
    chunk = _filled(iterator, [], most)
    while chunk:
        following = None
        if together is not None:
            while (following := next(iterator, None)) and together(chunk[-1], following) and len(chunk) < LONGEST_CHUNK:
                chunk.append(following)
        yield Chunk(first, chunk)
        first += len(chunk)
        chunk = _filled(iterator, [] if following is None else [following], most)


def _filled(items: Iterator[Item], chunk: list[Item], most: int) -> list[Item]:
    """Return the chunk with further items, until it has `most` items or enough characters."""
    characters = sum(len(text) for item in chunk for text in item)
    while len(chunk) < most and characters < CHARACTERS and (item := next(items, None)) is not None:
        chunk.append(item)
        characters += sum(map(len, item))
    return chunk


def live_chunks(items: Iterable[Item], together: Together | None = None) -> Iterator[Chunk]:
    """Chunks of the items that arrived during the work on the chunk before, so that single lines are answered at once.

    The last items that belong `together` wait for what follows them.
    """
    arriving, first, held = _Arriving(items), 0, list[Item]()
    while (new := arriving.take(CHUNK)) or held:
        chunk, known = [*held, *new], len(held)
        end = len(chunk)
        if new and together is not None:
            end = _last_seam(chunk, known, together) or (end if end >= LONGEST_CHUNK else 0)
        chunk, held = chunk[:end], chunk[end:]
        if chunk:
            yield Chunk(first, chunk)
            first += len(chunk)


class _Arriving:
    """Items that a thread reads ahead, to separate the items that have arrived from those still to come."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = items
        self._queue: Queue[Item | None] = Queue(2 * CHUNK)
        self._ended = False
        self._error: BaseException | None = None
        Thread(target=self._read, daemon=True).start()

    def take(self, most: int) -> list[Item]:
        """Wait for the next item; it and further items that have arrived, at most `most`; empty at the end.

        Raises: the error that stopped the reading, after all items before it have been taken.
        """
        taken: list[Item] = []
        while not self._ended and len(taken) < most and not (taken and self._queue.empty()):
            item = self._queue.get()
            if item is None:
                self._ended = True
            else:
                taken.append(item)
        if not taken and self._error is not None:
            raise self._error
        return taken

    def _read(self) -> None:
        try:
            for item in self._items:
                self._queue.put(item)
        except BaseException as error:  # `take` raises it
            self._error = error
        self._queue.put(None)


def _last_seam(chunk: list[Item], known: int, together: Together) -> int:
    """Return the last position at which a chunk can end, its length included; 0: nowhere yet.

    Its first `known` items belong together.
    """
    if not together(chunk[-1], chunk[-1]):  # it is alone, so whatever follows belongs to another chunk
        return len(chunk)
    return next(
        (end for end in range(len(chunk) - 1, max(known, 1) - 1, -1) if not together(chunk[end - 1], chunk[end])), 0
    )
