"""Segments as the tensors of a source batch."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mtkit.decoding.contract import SourceBatch
from mtkit.decoding.glossary import Glossary
from mtkit.decoding.lines.segments import Segment
from mtkit.text.tokenizer import PAD


def make_batch(
    segments: Sequence[Segment],
    limits: Sequence[int],
    device: torch.device,
    numbers: Sequence[int] | None = None,
    lines: list[list[int]] | None = None,
    stopped: Callable[[], bool] | None = None,
    glossary: Glossary | None = None,
) -> SourceBatch:
    """Pad the segments on the device; a translation has at most as many pieces as its limit.

    `numbers` are the numbers of the lines, as in `SourceLines`. `lines` and `stopped` become attributes of the batch.
    `glossary` is required if segments have terms.
    """
    terms = [segment.terms for segment in segments]
    of_segments = [segment.line if numbers is None else numbers[segment.line] for segment in segments]
    keys = [(line << 24) + segment.part for line, segment in zip(of_segments, segments, strict=True)]
    return SourceBatch(
        padded([segment.pieces for segment in segments], device),
        list(limits),
        torch.tensor(keys, device=device),
        tasks_of([segment.task for segment in segments], device),
        lines=lines,
        prefixes=[segment.prefix for segment in segments] if any(segment.prefix for segment in segments) else None,
        terms=glossary.of_batch(terms, device) if glossary is not None and any(terms) else None,
        stopped=stopped,
    )


def tasks_of(tasks: Sequence[int | None], device: torch.device) -> Tensor | None:
    """Return the task of each segment (B,) on the device; None for a model without tasks."""
    known = [task for task in tasks if task is not None]
    return torch.tensor(known, device=device) if known else None


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Pad the sequences of pieces on the right, (B, width of the longest) on the device."""
    rows = np.full((len(sequences), max(map(len, sequences))), PAD, dtype=np.int64)
    for row, pieces in zip(rows, sequences, strict=True):
        row[: len(pieces)] = pieces
    return torch.from_numpy(rows).to(device)
