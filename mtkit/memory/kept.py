"""Keeps freed memory for the next tensor, as PyTorch does on a GPU.

glibc maps each large block from the system and unmaps it when it is freed. The system then provides each new block page
by page, which often takes longer than the arithmetic on it. A command-line process keeps its memory until it exits; its
peak is the same. A program that imports mtkit as a library keeps its own settings.
"""

import ctypes
import os
import platform

MALLOPT = {-4: 0, -1: 2**31 - 1, -2: 2**26}
"""Parameters of mallopt(3), numbered as in malloc.h. M_MMAP_MAX: no block is mapped separately. M_TRIM_THRESHOLD: up to
2 GiB stay free at the end of the heap. M_TOP_PAD: the heap grows by 64 MiB at a time."""


def keep_freed_memory() -> bool:
    """Keep freed memory in this process. Return False without glibc or if the user set malloc options."""
    theirs = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if theirs or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) == 1 for parameter, value in MALLOPT.items()])
