"""Peak memory of this process."""

import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated on a CUDA device, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():  # getrusage's peak would include the parent process's peak
        for line in STATUS.read_text(encoding="ascii", errors="replace").split("\n"):
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def forget_peak() -> None:
    """Reset the peak of main memory to the memory held now, if the system supports it (Linux)."""
    with suppress(OSError):
        FORGET.write_text("5")  # proc(5): VmHWM becomes VmRSS
