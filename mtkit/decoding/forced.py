"""Forced decoding: log-probabilities and attention weights of given translations."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import TypeVar

import torch
from torch import Tensor

from mtkit.decoding.contexts import Context, ContextJoiner, ContextLimits, Pair, WithContext
from mtkit.decoding.contract import Engine
from mtkit.decoding.engines.model_engine import decoding_with, forced_output
from mtkit.decoding.lines.batches import padded, tasks_of
from mtkit.decoding.lines.segments import Segment, Source
from mtkit.decoding.lines.source import SourceLines
from mtkit.decoding.parallel import map_batches
from mtkit.decoding.translation import OnProgress
from mtkit.errors import DataError
from mtkit.model.layers import Weights
from mtkit.model.network import Network
from mtkit.text.tokenizer import EOS, Tokenizers

TOKENS = 2048
"""Maximum padded pieces per side in a batch of `over_segments`: each head has a weight for every pair of pieces."""

Layers = list[Tensor | None]
"""The weights of each cross-attention layer; None for a mechanism that has none."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Forced(WithContext):
    """The log-probabilities of a given translation, piece by piece."""

    pieces: tuple[int, ...]
    """Its pieces, EOS at the end, without its context."""
    log_probs: tuple[float, ...]
    """The log-probability of each piece, given the source, the context and the pieces before it."""

    @property
    def log_prob(self) -> float:
        """The log-probability of the translation, its end included."""
        return fsum(self.log_probs)


def force_lines(
    engine: Engine,
    tokenizers: Tokenizers,
    lines: SourceLines | Sequence[str],
    targets: Sequence[str],
    contexts: Sequence[Context] | None = None,
    limits: ContextLimits | None = None,
    *,
    alike: Sequence[Hashable] | None = None,
    on_progress: OnProgress = lambda lines: None,
) -> list[Forced]:
    """Return the piece log-probabilities of each target line, given its source line.

    With `contexts` for a model with these `limits`, each line and its target follow as much of their context as fits;
    lines with equal values in `alike` get the same number of context sentences.

    In float32 the result of a pair is independent of the others. A batch holds at most `batch_tokens` (a setting of the
    engine) padded pieces per side, or one pair.

    Raises: DataError for unequal numbers of lines, and for a line that is too long for the model.
    """
    lines = SourceLines.of(lines)
    front, encoded = check_pairs(engine, tokenizers, lines, targets)
    source = front.encoded
    if contexts is None or limits is None:
        pairs = [Pair(front.segment(row, source[row]), [*target, EOS]) for row, target in enumerate(encoded)]
    else:
        joiner = ContextJoiner(front, tokenizers, contexts, limits, engine.longest_target)
        pairs = joiner.pairs(targets, encoded, alike)
    with engine.ready() as device:

        def force(rows: Sequence[int]) -> list[Forced]:
            batch = [pairs[row] for row in rows]
            values: list[list[float]] = engine.log_probs(
                padded([pair.segment.pieces for pair in batch], device),
                padded([pair.target for pair in batch], device),
                task=tasks_of([pair.segment.task for pair in batch], device),
            ).tolist()
            return [_without_context(pair, row) for pair, row in zip(batch, values, strict=True)]

        segments, all_targets = [pair.segment for pair in pairs], [pair.target for pair in pairs]
        return _in_batches(force, segments, all_targets, engine.settings.batch_tokens, device, on_progress)


def check_pairs(
    model: Engine | Network, tokenizers: Tokenizers, lines: SourceLines, targets: Sequence[str]
) -> tuple[Source, list[list[int]]]:
    """Return the source, and the pieces of the target lines, which make pairs within the limits of the model.

    Raises: DataError for unequal numbers of lines, and for a line that is too long for the model.
    """
    if len(lines.lines) != len(targets):
        raise DataError(f"{len(lines.lines):,} source lines and {len(targets):,} target lines do not make pairs")
    front = Source(lines, tokenizers.source, model.longest_source)
    encoded = tokenizers.target.encode_lines(targets)
    numbers = range(len(targets)) if lines.numbers is None else lines.numbers
    _check_lengths([len(part) + 1 for part in front.encoded], front.longest and front.longest + 1, "source", numbers)
    _check_lengths([len(part) + 1 for part in encoded], model.longest_target, "target", numbers)
    return front, encoded


def _without_context(pair: Pair, log_probs: Sequence[float]) -> Forced:
    """Return the result of a pair with the log-probabilities of all its target pieces, padded."""
    places = slice(pair.first, len(pair.target))
    return Forced(tuple(pair.target[places]), tuple(log_probs[places]), context=pair.context, cut=pair.cut)


def _check_lengths(lengths: list[int], longest: int | None, side: str, numbers: Sequence[int]) -> None:
    for number, length in zip(numbers, lengths, strict=True):
        if longest is not None and length > longest:
            raise DataError(
                f"{side} line {number + 1} has {length:,} pieces, its end included, and the model takes {longest:,}; "
                "shorten the line, or train with a larger model.max_length"
            )


def over_segments(
    network: Network,
    segments: Sequence[Segment],
    targets: Sequence[Sequence[int]],
    work: Callable[[int, Layers], Result],
) -> list[Result]:
    """`work(index, weights)` of each segment, in order, with the weights (H, T, S) of each cross-attention layer.

    targets are the pieces of the segments' translations, EOS at the end. Several threads may call `work`.
    """
    with decoding_with(network, None) as device:

        def results(rows: Sequence[int]) -> list[Result]:
            batch, answers = [segments[row] for row in rows], [targets[row] for row in rows]
            sources, tasks = [segment.pieces for segment in batch], [segment.task for segment in batch]
            layers = forced_weights(network, sources, answers, tasks, device)["cross"]
            outcome = []
            for k, row in enumerate(rows):
                unpadded = (k, slice(None), slice(len(answers[k])), slice(len(sources[k])))
                outcome.append(work(row, [layer if layer is None else layer[unpadded].cpu() for layer in layers]))
            return outcome

        return _in_batches(results, segments, targets, TOKENS, device)


def _in_batches(
    work: Callable[[Sequence[int]], list[Result]],
    segments: Sequence[Segment],
    targets: Sequence[Sequence[int]],
    batch_tokens: int | None,
    device: torch.device,
    on_progress: OnProgress = lambda lines: None,
) -> list[Result]:
    """Return the results for pairs of a segment and a target, in order; `work` computes a batch of indices."""
    lengths = [max(len(segment.pieces), len(target)) for segment, target in zip(segments, targets, strict=True)]
    results: dict[int, Result] = {}
    for batch in map_batches(work, lengths, batch_tokens, device):
        results |= batch
        on_progress(len(batch))
    return [results[row] for row in range(len(lengths))]


def forced_weights(
    network: Network,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    tasks: Sequence[int | None],
    device: torch.device,
    roles: Sequence[str] = ("cross",),
) -> Weights:
    """Return the attention weights of these roles, in all layers, for a batch of segments with given translations.

    sources and targets are pieces with EOS at the end; tasks are the segments'. Weights at padding are meaningless.
    Call it within `decoding_with`.
    """
    weights: Weights = {role: [] for role in roles}
    forced_output(network, padded(sources, device), padded(targets, device), tasks_of(tasks, device), weights)
    return weights
