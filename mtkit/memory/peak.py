"""The most memory that this process has held at once."""

import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held at once: on CUDA on the device, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():  # getrusage's number would begin with that of the process which started this one
        for line in STATUS.read_text(encoding="ascii", errors="replace").split("\n"):
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource  # which Windows lacks

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def forget_peak() -> None:
    """Let the peak of main memory begin at what is held now, where the system can (Linux)."""
    with suppress(OSError):
        FORGET.write_text("5")  # proc(5): VmHWM becomes VmRSS
