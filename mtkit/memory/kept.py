"""Memory that was freed is kept for the next tensor, as PyTorch keeps it on a GPU.

glibc asks the system for each large block anew and gives it back when it is freed. The system then hands over each new
block page by page, which takes longer than much of the arithmetic on it. A process of the command line keeps what it
has held until it ends; its peak is the same. A program that imports mtkit as a library keeps its own settings.
"""

import ctypes
import os
import platform

MALLOPT = {-4: 0, -1: 2**31 - 1, -2: 2**26}
"""Parameters of mallopt(3) as malloc.h numbers them. M_MMAP_MAX: no block is mapped on its own. M_TRIM_THRESHOLD: up to
2 GiB stay free at the end of the heap. M_TOP_PAD: the heap grows by 64 MiB at a time."""


def keep_freed_memory() -> bool:
    """Keep freed memory in this process. Gives False without glibc, and where the user's own settings stand."""
    theirs = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if theirs or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) == 1 for parameter, value in MALLOPT.items()])
