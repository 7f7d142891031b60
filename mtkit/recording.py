"""Computations that are recorded as CUDA graphs, and repeated; the values that they share.

A GPU often runs kernels faster than the host starts them; a graph starts all its kernels at once. It repeats the same
kernels on the same memory. Numbers that the host computed keep the values of the recording, and a copy from the host
cannot be recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Records a computation without making it; returns its results' memory, and the function that fills it."""

_present: list[list[Any] | None] = [None]


def recording() -> list[Any] | None:
    """Return the kept values that the present recording has read so far; None outside `recorded`."""
    return _present[0]


@contextmanager
def _noted(values: list[Any]) -> Iterator[None]:
    _present[0] = values
    try:
        yield
    finally:
        _present[0] = None


def recorded(record: Recorder, compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Record a computation, which must have been made just before: this loads its kernels and makes its `Kept` values.

    Raises: RuntimeError if it cannot be recorded.
    """
    values: list[Any] = []
    with _noted(values):
        results, run = record(compute)

    def repeat(values: list[Any] = values) -> None:  # a graph reads kept values even after their caches drop them
        run()

    return results, repeat


class Kept(Generic[P, T]):
    """A function of hashable arguments whose last results are kept, for training too if inference made them."""

    def __init__(self, make: Callable[P, T], results: int) -> None:
        update_wrapper(self, make)
        self._cached: Any = lru_cache(results)(torch.inference_mode(False)(make))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result. Raises: RuntimeError if it would have to be made in a recording."""
        values, misses = recording(), self._cached.cache_info().misses
        value: T = self._cached(*args, **kwargs)
        if values is None:
            return value
        if self._cached.cache_info().misses > misses:
            self._cached.cache_clear()  # it is not computed yet
            raise RuntimeError(f"{self.__name__} has no kept result, and cannot be recorded")  # type: ignore[attr-defined]
        values.append(value)
        return value

    def cache_clear(self) -> None:
        """Drop all kept results."""
        self._cached.cache_clear()


def kept(results: int) -> Callable[[Callable[P, T]], Kept[P, T]]:
    """Keep so many results of a function, those used last."""
    return lambda make: Kept(make, results)


ROOM = 0.1
"""Share of a GPU's memory that is free before another graph is recorded."""


class Graphs:
    """Records computations as CUDA graphs, which share memory: only one at a time may be in use.

    Their results are in this memory, which is free again when nothing refers to `Graphs`, a graph or results any more.
    """

    def __init__(self, device: torch.device, *, together: bool = False) -> None:
        """`together`: the graphs are freed together; then they can share the memory between kernels as well."""
        self._device = device
        with torch.cuda.device(device):
            # PyTorch shares memory by streams, and frees the workspace of a stream's products with any of its graphs
            # (pytorch issue 193402): streams of high priority are none of those that others get
            self._stream = torch.cuda.Stream(priority=-1) if together else None
            torch.cuda.empty_cache()  # memory cannot be released while something is recorded
            torch.zeros(1, device=device)  # loads the kernel
            self._first = torch.cuda.CUDAGraph()  # the memory lasts as long as a graph that has it
            self._capture(self._first, lambda: torch.zeros(1, device=device))

    def __call__(self, compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record a computation, as a `Recorder`. Raises: RuntimeError if it cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            try:
                return self._capture(graph, compute, pool=self._first.pool()), graph.replay
            except RuntimeError:
                # the random generator believes itself recorded until another recording ends well
                self._capture(torch.cuda.CUDAGraph(), lambda: torch.zeros(1, device=self._device))
                raise

    def has_room(self) -> bool:
        """Whether the GPU has memory for another graph, which is outside of PyTorch's memory."""
        free, total = torch.cuda.mem_get_info(self._device)
        return free > ROOM * total

    def _capture(self, graph: torch.cuda.CUDAGraph, compute: Callable[[], Any], **pool: Any) -> Any:
        stream, results = self._stream or torch.cuda.Stream(), None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(**pool, capture_error_mode="thread_local")  # other threads may use the device
            waits, failed = torch.cuda.get_sync_debug_mode(), True
            # a wait for the device would invalidate the recording; PyTorch raises an error before it
            torch.cuda.set_sync_debug_mode("error")
            try:
                results, failed = compute(), False
            finally:
                torch.cuda.set_sync_debug_mode(waits)
                with suppress(RuntimeError) if failed else nullcontext():  # the first error is the reason
                    graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return results
