"""Forced decoding: how likely the model finds given translations."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from mtkit.data.tokenizer import BOS, EOS, PAD, Tokenizers
from mtkit.decoding.arithmetic import decoding_with
from mtkit.decoding.batches import padded, plan, tasks_of
from mtkit.decoding.ensemble import mean_of, networks_of
from mtkit.decoding.lines.segments import Directions, Source
from mtkit.decoding.side_by_side import at_once, side_by_side
from mtkit.decoding.translate import OnProgress
from mtkit.errors import DataError
from mtkit.model.network import Model, Network
from mtkit.out_of_memory import Halving

ROWS = 1024
"""Positions whose logits over the vocabulary are in memory at the same time, for each batch that is worked on."""


def log_probs_of_lines(
    model: Model,
    tokenizers: Tokenizers,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    batch_tokens: int,
    directions: Directions | None = None,
    first: int = 0,
    dtype: torch.dtype | None = None,
    on_progress: OnProgress | None = None,
) -> list[float]:
    """The log-probability of each target line, its end included, given its source line.

    In float32 a pair's result does not depend on the others. A batch holds at most `batch_tokens` padded pieces of
    either side, or one pair. `directions` are needed by a model that was trained on several; `first` is the number of
    the first line among all, from 0, for messages.

    Raises: DataError for unequal numbers of lines, and for a line that is too long for the model.
    """
    if len(sources) != len(targets):
        raise DataError(f"{len(sources):,} source lines and {len(targets):,} target lines do not make pairs")
    front = Source(tokenizers.source, model.longest_source, directions)
    source = tokenizers.source.encode_lines(sources)
    target = [[*pieces, EOS] for pieces in tokenizers.target.encode_lines(targets)]
    _check_lengths([len(pieces) + 1 for pieces in source], front.longest and front.longest + 1, "source", first)
    _check_lengths([len(pieces) for pieces in target], model.longest_target, "target", first)
    segments = [front.segment(number, pieces) for number, pieces in enumerate(source)]
    lengths = [max(len(s.pieces), len(t)) for s, t in zip(segments, target, strict=True)]
    results = [0.0] * len(sources)
    with decoding_with(model, dtype) as device:

        def forced(rows: Sequence[int]) -> list[float]:
            batch = [segments[row] for row in rows]
            found = forced_log_probs(
                model,
                padded([segment.pieces for segment in batch], device),
                padded([target[row] for row in rows], device),
                task=tasks_of([segment.task for segment in batch], device),
            )
            return found.tolist()

        batches = plan(lengths, batch_tokens, 1, at_once(device))
        parts = side_by_side(partial(Halving(lengths).run, forced), batches, device)
        for rows, found in zip(batches, parts, strict=True):
            for row, log_prob in zip(rows, chain.from_iterable(found), strict=True):
                results[row] = log_prob
            if on_progress is not None:
                on_progress(len(rows))
    return results


def forced_log_probs(model: Model, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
    """The log-probability of each target, EOS included, given its source: (B,) float32.

    source (B, S) and target (B, T) pieces, EOS at the end, padded on the right; task (B,).
    """
    valid = target != PAD
    log_probs = torch.zeros(target.shape, device=target.device)
    log_probs[valid] = mean_of([_of_network(each, source, target, valid, task) for each in networks_of(model)])
    return log_probs.sum(1)


def _of_network(network: Network, source: Tensor, target: Tensor, valid: Tensor, task: Tensor | None) -> Tensor:
    """The log-probability of each real piece of the targets, (M,), those before it given."""
    begin = torch.full_like(target[:, :1], BOS)
    target_in = torch.cat([begin, target[:, :-1].masked_fill(target[:, :-1] == EOS, PAD)], 1)
    output = network.forward(source, target_in, source_valid=source != PAD, target_valid=valid, task=task)
    parts = zip(output.hidden[valid].split(ROWS), target[valid].split(ROWS), strict=True)
    return torch.cat([_log_probs(network.logits(part), pieces) for part, pieces in parts])


def _log_probs(logits: Tensor, pieces: Tensor) -> Tensor:
    """The log-probabilities (M,) of pieces (M,) under logits (M, V)."""
    logits = logits.float()
    return logits.gather(1, pieces[:, None]).squeeze(1) - logits.logsumexp(1)


def _check_lengths(lengths: list[int], longest: int | None, side: str, first: int) -> None:
    for number, length in enumerate(lengths, start=first + 1):
        if longest is not None and length > longest:
            raise DataError(
                f"{side} line {number} has {length:,} pieces, its end included, and the model takes {longest:,}; "
                "shorten the line, or train with a larger model.max_length"
            )
