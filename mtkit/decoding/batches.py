"""Batches of source segments of similar length."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mtkit.data.tokenizer import PAD
from mtkit.decoding.lines.segments import Segment
from mtkit.decoding.search import SourceBatch

LEAST = 512
"""Padded pieces below which batches are not made smaller for the sake of evenness."""


def plan(lengths: Sequence[int], batch_tokens: int, hypotheses: int, at_once: int = 1) -> list[list[int]]:
    """Indices of the segments of each batch, longest first, so that memory runs out in the first batch or never.

    A batch holds at most `batch_tokens` padded source pieces, each counted once per hypothesis, or one segment. If
    several batches are computed `at_once`, the number of batches is raised to a multiple of this number, with batches
    as small as that allows, so that all end at about the same time.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()

    def filled(limit: int) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0
        for index in order:
            if room < 1:
                batches.append([])
                room = max(1, limit // (hypotheses * lengths[index]))
            batches[-1].append(index)
            room -= 1
        return batches

    batches = filled(batch_tokens)
    if at_once > 1:
        count = -(-len(batches) // at_once) * at_once
        least = min(LEAST, batch_tokens)
        batches = filled(bisect_left(range(batch_tokens), True, least, key=lambda limit: len(filled(limit)) <= count))
    return batches


def make_batch(
    segments: Sequence[Segment],
    limits: Sequence[int],
    device: torch.device,
    numbers: Sequence[int] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> SourceBatch:
    """The segments, padded, on the device, with the maximum number of pieces of each translation.

    `numbers` are those of the lines among all, from 0; None: their indices. `stopped` is that of the batch.
    """
    source = padded([segment.pieces for segment in segments], device)
    lines = [segment.line if numbers is None else numbers[segment.line] for segment in segments]
    keys = torch.tensor(
        [(line << 24) + segment.part for line, segment in zip(lines, segments, strict=True)], device=device
    )
    tasks = tasks_of([segment.task for segment in segments], device)
    return SourceBatch(source, list(limits), keys, tasks, stopped=stopped)


def tasks_of(tasks: Sequence[int | None], device: torch.device) -> Tensor | None:
    """The task of each segment (B,) on the device; None for a model without tasks."""
    known = [task for task in tasks if task is not None]
    return torch.tensor(known, device=device) if known else None


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The sequences of pieces as (B, width of the longest), PAD behind the others, on the device."""
    rows = np.full((len(sequences), max(map(len, sequences))), PAD, dtype=np.int64)
    for row, pieces in zip(rows, sequences, strict=True):
        row[: len(pieces)] = pieces
    return torch.from_numpy(rows).to(device)
