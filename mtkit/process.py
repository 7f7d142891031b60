"""Settings of the process that save time and memory, and its signals. This module does not import PyTorch."""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

MALLOPT = {-4: 0, -1: 2**31 - 1, -2: 2**26, 1: 0}
"""Parameters of mallopt(3), numbered as in malloc.h. M_MMAP_MAX: no block is mapped separately. M_TRIM_THRESHOLD: up to
2 GiB stay free at the end of the heap. M_TOP_PAD: the heap grows by 64 MiB at a time. M_MXFAST: no list of free small
blocks, see `NO_CACHE`."""

TUNABLES, NO_CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
"""The environment variable with glibc's settings, and the setting that turns off each thread's cache of free small
blocks. Blocks in the cache are not joined with the free memory around them. A large block then does not fit into the
gap that an equally large one left, and the heap grows each time."""


def restart_without_cache() -> None:
    """Start the command of this process again with `NO_CACHE`, which glibc reads only when a process starts.

    Returns if the setting is there, if the C library is not glibc, and if the user set malloc options.
    """
    tunables = os.environ.get(TUNABLES, "")
    if NO_CACHE in tunables or not _is_ours_to_set():
        return
    os.environ[TUNABLES] = f"{tunables}:{NO_CACHE}" if tunables else NO_CACHE
    with suppress(OSError):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def set_environment() -> None:
    """Set the variables that PyTorch and libgomp read when they are first imported, unless the user has set them."""
    # large tensors on the CPU get large pages: the C library maps such tensors anew, and faults in pages of 4 KB take
    # longer than much of the arithmetic
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # oneDNN makes a kernel for each shape of a product. By default, it and PyTorch each keep 1,024; the updates of a
    # small model have some thirty shapes each, and most do not return soon
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    if "OMP_WAIT_POLICY" not in os.environ:
        # threads that wait for each other sleep after this many spins, not after 300,000: a spinning thread takes a
        # shared core from the thread that it waits for; on idle cores it starts sooner than one that sleeps
        os.environ.setdefault("GOMP_SPINCOUNT", "10000" if cores_are_idle() else "1000")


def cores_are_idle(load: Path = Path("/proc/loadavg")) -> bool:
    """Return whether no other process computes, in one of three moments, as far as Linux shows it."""
    for _ in range(3):
        try:
            running = int(load.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return False
        if running <= 1:  # this process itself
            return True
        time.sleep(0.001)
    return False


def keep_freed_memory() -> bool:
    """Keep freed memory for the next tensor. Return False without glibc or if the user set malloc options.

    glibc maps each large block from the system and unmaps it when it is freed. The system then provides each new block
    page by page, which often takes longer than the arithmetic on it. The process keeps its memory until it exits; its
    peak is the same.
    """
    if not _is_ours_to_set():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) == 1 for parameter, value in MALLOPT.items()])


def release_freed_memory() -> None:
    """Return freed memory to the system (malloc_trim(3)); without glibc, do nothing."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _is_ours_to_set() -> bool:
    """Return whether the C library is glibc and the user has not set its malloc options."""
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError):  # not Linux
        return False
    by_user = os.environ.get(TUNABLES, "").replace(NO_CACHE, "")
    named = any(name.startswith("MALLOC_") for name in os.environ)
    return library.startswith("glibc") and not named and "malloc" not in by_user


NEW_OBJECTS = 500_000
"""New containers after which Python's garbage collector looks for cycles among them; its own default is 700."""


def collect_garbage_rarely() -> None:
    """Run Python's garbage collector rarely, and not at exit.

    The imports of PyTorch and numba create up to half a million containers, which all live until the exit. The
    collector would visit them dozens of times at the start and, at the exit, once more, which together takes longer
    than a command of one line.
    """
    gc.set_threshold(NEW_OBJECTS)
    atexit.register(gc.freeze)


@contextmanager
def signals_to(
    handler: Callable[[int, FrameType | None], object], *, ignored_afterwards: bool = False
) -> Iterator[None]:
    """Context in which SIGTERM, SIGINT and SIGHUP call the handler; nothing in other threads than the main one.

    A SIGHUP, which the end of a remote session sends, stays ignored if it was, as by `nohup`. Afterwards the handlers
    from before are back, or, for a process that only has to end, the signals are ignored.
    """
    # only the main thread can set handlers
    numbers = [signal.SIGTERM, signal.SIGINT] if threading.current_thread() is threading.main_thread() else []
    if numbers and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            signal.signal(number, signal.SIG_IGN if ignored_afterwards else previous_handler)
