"""Settings of the process that make it start, compute and exit faster. This module does not import PyTorch."""

import atexit
import ctypes
import gc
import os
import platform
import time
from pathlib import Path

MALLOPT = {-4: 0, -1: 2**31 - 1, -2: 2**26}
"""Parameters of mallopt(3), numbered as in malloc.h. M_MMAP_MAX: no block is mapped separately. M_TRIM_THRESHOLD: up to
2 GiB stay free at the end of the heap. M_TOP_PAD: the heap grows by 64 MiB at a time."""


def set_environment() -> None:
    """Set the variables that PyTorch and libgomp read when they are first imported, unless the user has set them."""
    # large tensors on the CPU get large pages: the C library maps such tensors anew, and faults in pages of 4 KB take
    # longer than much of the arithmetic
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # oneDNN makes a kernel for each shape of a product and by default keeps 1,024, which take 300 MB in training and
    # validation; the updates of a small model have some thirty shapes each, and most do not return soon
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
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
    user_set = any(name.startswith("MALLOC_") for name in os.environ)
    user_set = user_set or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if user_set or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) == 1 for parameter, value in MALLOPT.items()])


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
