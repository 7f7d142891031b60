"""Batches of source segments of similar length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtkit.decoding.search import EOS, PAD, SourceBatch


@dataclass(frozen=True)
class Segment:
    """What is translated at once: a line, or a part of one that was cut."""

    line: int
    """Index of the line, from 0."""
    part: int
    """Index of the part in its line, from 0."""
    pieces: list[int]
    """Source pieces, EOS at the end."""


def plan(lengths: Sequence[int], batch_tokens: int, hypotheses: int) -> list[list[int]]:
    """Indices of the segments of each batch: longest first, so that memory is short at once or never.

    A batch holds at most `batch_tokens` padded source pieces, each counted once for each hypothesis, or one segment.
    """
    batches: list[list[int]] = []
    room = 0
    for index in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        if room < 1:
            batches.append([])
            room = max(1, batch_tokens // (hypotheses * lengths[index]))
        batches[-1].append(index)
        room -= 1
    return batches


def make_batch(segments: Sequence[Segment], longest_target: int | None, device: torch.device) -> SourceBatch:
    """The segments, padded, on the device."""
    source = padded([segment.pieces for segment in segments], device)
    keys = torch.tensor([(segment.line << 24) + segment.part for segment in segments], device=device)
    limits = [target_limit(len(segment.pieces), longest_target) for segment in segments]
    return SourceBatch(source, limits, keys)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The sequences of pieces as (B, width of the longest), PAD behind the others, on the device."""
    rows = np.full((len(sequences), max(map(len, sequences))), PAD, dtype=np.int64)
    for row, pieces in zip(rows, sequences, strict=True):
        row[: len(pieces)] = pieces
    return torch.from_numpy(rows).to(device)


def target_limit(source_pieces: int, longest_target: int | None) -> int:
    """The pieces that the translation of so many source pieces may have at most, EOS counted on both sides."""
    limit = 2 * source_pieces + 20
    return limit if longest_target is None else min(limit, longest_target)


def with_end(pieces: list[int], longest: int | None) -> list[int]:
    """The pieces and EOS, at most `longest` together."""
    return [*(pieces if longest is None else pieces[: longest - 1]), EOS]
