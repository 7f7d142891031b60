"""Forced decoding: how likely the model finds given translations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtkit.data.tokenizer import BOS, EOS, PAD, Tokenizers
from mtkit.decoding.batches import padded, plan
from mtkit.decoding.device import decoding_with
from mtkit.decoding.search import Model
from mtkit.decoding.translate import OnProgress
from mtkit.errors import DataError

ROWS = 4096
"""Positions whose logits over the vocabulary are in memory at the same time."""


def log_probs_of_lines(
    model: Model,
    tokenizers: Tokenizers,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    batch_tokens: int,
    dtype: torch.dtype | None = None,
    on_progress: OnProgress | None = None,
) -> list[float]:
    """The log-probability of each target line, its end included, given its source line.

    In float32 a pair's result does not depend on the others. A batch holds at most `batch_tokens` padded pieces of
    either side, or one pair.

    Raises: DataError for unequal numbers of lines, and for a line that is too long for the model.
    """
    if len(sources) != len(targets):
        raise DataError(f"{len(sources):,} source lines and {len(targets):,} target lines do not make pairs")
    source = [[*pieces, EOS] for pieces in tokenizers.source.encode_lines(sources)]
    target = [[*pieces, EOS] for pieces in tokenizers.target.encode_lines(targets)]
    _check_lengths(source, model.longest_source, "source")
    _check_lengths(target, model.longest_target, "target")
    results = [0.0] * len(sources)
    with decoding_with(model, dtype) as device:
        for rows in plan([max(len(s), len(t)) for s, t in zip(source, target, strict=True)], batch_tokens, 1):
            sides = (padded([side[row] for row in rows], device) for side in (source, target))
            found = forced_log_probs(model, *sides)
            for row, log_prob in zip(rows, found.tolist(), strict=True):
                results[row] = log_prob
            if on_progress is not None:
                on_progress(len(rows))
    return results


def forced_log_probs(model: Model, source: Tensor, target: Tensor) -> Tensor:
    """The log-probability of each target, EOS included, given its source: (B,) float32.

    source (B, S) and target (B, T) pieces, EOS at the end, padded on the right.
    """
    begin = torch.full_like(target[:, :1], BOS)
    target_in = torch.cat([begin, target[:, :-1].masked_fill(target[:, :-1] == EOS, PAD)], 1)
    valid = target != PAD
    hidden = model.forward(source, target_in, source_valid=source != PAD, target_valid=valid).hidden[valid]  # (M, D)
    parts = zip(hidden.split(ROWS), target[valid].split(ROWS), strict=True)
    log_probs = torch.zeros(target.shape, device=target.device)
    log_probs[valid] = torch.cat([_log_probs(part @ model.output_weight.T, pieces) for part, pieces in parts])
    return log_probs.sum(1)


def _log_probs(logits: Tensor, pieces: Tensor) -> Tensor:
    """The log-probabilities (M,) of pieces (M,) under logits (M, V)."""
    logits = logits.float()
    return logits.gather(1, pieces[:, None]).squeeze(1) - logits.logsumexp(1)


def _check_lengths(sequences: list[list[int]], longest: int | None, side: str) -> None:
    for number, pieces in enumerate(sequences, start=1):
        if longest is not None and len(pieces) > longest:
            raise DataError(
                f"{side} line {number} has {len(pieces):,} pieces, its end included, and the model takes {longest:,}; "
                "shorten the line, or train with a larger model.max_length"
            )
