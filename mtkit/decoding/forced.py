"""Forced decoding: the likelihood of given translations under an engine."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

from mtkit.decoding.contract import Engine
from mtkit.decoding.lines.source import Directions, Source
from mtkit.decoding.parallel import at_once, parallel_map
from mtkit.decoding.translate import OnProgress, padded, plan, tasks_of
from mtkit.errors import DataError
from mtkit.memory import Halving
from mtkit.text.tokenizer import EOS, Tokenizers


def log_probs_of_lines(
    engine: Engine,
    tokenizers: Tokenizers,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    directions: Directions | None = None,
    first: int = 0,
    on_progress: OnProgress | None = None,
) -> list[float]:
    """The log-probability of each target line, its end included, given its source line.

    In float32 the result of a pair is independent of the others. A batch holds at most `batch_tokens` (a setting of the
    engine) padded pieces per side, or one pair. `directions` are required for a model trained on several. `first` is
    the number of the first line among all, from 0, for messages.

    Raises: DataError for unequal numbers of lines, and for a line that is too long for the model.
    """
    if len(sources) != len(targets):
        raise DataError(f"{len(sources):,} source lines and {len(targets):,} target lines do not make pairs")
    front = Source(tokenizers.source, engine.longest_source, directions)
    source = tokenizers.source.encode_lines(sources)
    target = [[*pieces, EOS] for pieces in tokenizers.target.encode_lines(targets)]
    _check_lengths([len(pieces) + 1 for pieces in source], front.longest and front.longest + 1, "source", first)
    _check_lengths([len(pieces) for pieces in target], engine.longest_target, "target", first)
    segments = [front.segment(number, pieces) for number, pieces in enumerate(source)]
    lengths = [max(len(s.pieces), len(t)) for s, t in zip(segments, target, strict=True)]
    found: dict[int, float] = {}
    with engine.ready() as device:

        def forced(rows: Sequence[int]) -> list[float]:
            batch = [segments[row] for row in rows]
            log_probs = engine.log_probs(
                padded([segment.pieces for segment in batch], device),
                padded([target[row] for row in rows], device),
                task=tasks_of([segment.task for segment in batch], device),
            )
            return log_probs.tolist()

        batches = plan(lengths, engine.settings.batch_tokens, 1, at_once(device))
        parts = parallel_map(partial(Halving(lengths).run, forced), batches, device)
        for rows, log_probs in zip(batches, parts, strict=True):
            found |= zip(rows, chain.from_iterable(log_probs), strict=True)
            if on_progress is not None:
                on_progress(len(rows))
    return [found[row] for row in range(len(sources))]


def _check_lengths(lengths: list[int], longest: int | None, side: str, first: int) -> None:
    for number, length in enumerate(lengths, start=first + 1):
        if longest is not None and length > longest:
            raise DataError(
                f"{side} line {number} has {length:,} pieces, its end included, and the model takes {longest:,}; "
                "shorten the line, or train with a larger model.max_length"
            )
