"""Whether other processes keep this machine busy; operations that decoding requires, counted segment by segment.

Operations are counted in the model's own steps, whatever a program does to be faster. A multiplication with its
addition counts as two.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from mtkit.attention import State
from mtkit.model.network import Network
from mtkit.text.tokenizer import BOS
from mtkit.training.data_loader import evenly_spaced
from mtkit.training.flops import flops_of


def busy_note(threads: int, *, samples: int = 9, seconds: float = 0.3) -> str | None:
    """Return a warning if other processes leave fewer than `threads` cores; None if they do not, or if unknown.

    Running tasks are counted `samples` times within `seconds`; tasks that wait for files or terminals do not count.
    """
    counts = []
    for _ in range(samples):
        try:
            running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]
        except OSError:  # not Linux
            return None
        counts.append(int(running) - 1)  # without this process, which runs as it reads
        time.sleep(seconds / samples)
    others, cores = round(median(counts)), os.cpu_count() or 1
    if others < 1 or others + threads <= cores:
        return None
    return f"other processes keep {others} of {cores} cores busy, and this one uses {threads}: speeds are too low"


SAMPLE = 24
"""Number of segments that are counted, of all lengths."""


@torch.no_grad()
def decoding_operations(model: Network, segments: Sequence[tuple[int, int]], beam: int) -> float:
    """Return the mean operations of decoding a segment, over a sample of `segments` (source pieces, target pieces).

    Each source is encoded once. One hypothesis takes the first step; `beam` hypotheses take one step for each further
    piece of the translation.
    """
    device, chosen = model.output_weight.device, evenly_spaced(sorted(segments, key=sum), SAMPLE)
    return sum(_decode(model, *lengths, beam, device) for lengths in chosen) / len(chosen)


def _decode(model: Network, source: int, target: int, beam: int, device: torch.device) -> float:
    """Count the first and last step; assume linear growth between them, and in the number of hypotheses."""
    pieces = torch.full((1, source), BOS, device=device)
    token = torch.full((1, 1), BOS, device=device)  # with several tokens, attention may mask more than it needs
    state: State = {}

    def start() -> None:
        nonlocal state
        state = model.start(model.encode(pieces))

    def step() -> None:
        nonlocal state
        logits, state, _ = model.step(token, state)
        logits.whole()

    begin, first = flops_of(start), flops_of(step)
    for _ in range(target - 2):
        step()
    last = flops_of(step) if target > 1 else first
    return begin + first + beam * (target * (first + last) / 2 - first) if target else begin
