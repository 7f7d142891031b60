"""Translation of documents: neighbouring lines are joined, translated at once, and separated again."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from mtkit.decoding.lines.segments import Segment, Source, Window, split_lines
from mtkit.decoding.lines.source import TrainedOn
from mtkit.decoding.translation import OnProgress, Translation
from mtkit.text.tokenizer import BREAK, Tokenizer

Translate = Callable[[Sequence[Segment]], Iterable[list[tuple[int, list[Translation]]]]]
"""Function that translates segments, batch by batch: the index of each, and its translations, best first."""


def translate_joined(
    source: Source,
    translate: Translate,
    separate: Callable[[Segment, Translation], list[Translation]],
    on_progress: OnProgress = lambda lines: None,
) -> tuple[dict[int, Translation], dict[int, int]]:
    """Translate the windows of the source's documents; `separate` is `separate_lines` with its first arguments.

    If a joint translation does not separate into its lines, each half of the window is translated, down to two lines.

    Return the translations by number of the line, and for each line of a window that did not separate, the number of
    lines that were joined.
    """
    translated: dict[int, Translation] = {}
    fell_back: dict[int, int] = {}
    place = attrgetter("place")
    for _, same_place in groupby(sorted(source.windows(), key=place), place):  # each place is the next one's context
        windows = [*same_place]
        while joined := [*_joined(source, windows, translated)]:
            windows = []
            for batch in translate([segment for _, segment in joined]):
                for index, (joint, *_) in batch:
                    window, segment = joined[index]
                    if separated := separate(segment, joint):
                        translated |= zip(window.lines, separated[-len(window.lines) :], strict=True)
                        on_progress(len(window.lines))
                    else:
                        windows += window.halves()
                        if joined_lines := segment.pieces.count(BREAK):
                            fell_back |= dict.fromkeys(window.lines, joined_lines + 1)
    return translated, fell_back


def _joined(
    source: Source, windows: Iterable[Window], translated: Mapping[int, Translation]
) -> Iterator[tuple[Window, Segment]]:
    """Yield the windows that join several lines, as segments that begin with the `translated` lines of the context.

    A line whose context did not separate is a segment too, so that it can be the context of the next window.
    """
    for window in windows:
        context = window.known(lambda number: translated[number].pieces if number in translated else ())
        if window.context or len(window.lines) > 1:
            yield window, source.join_lines([*context, *window.lines], context.values())


def separate_lines(
    tokenizer: Tokenizer, trained_on: TrainedOn, most: int | None, segment: Segment, joint: Translation
) -> list[Translation]:
    """Return the translation of each joined line; none if the joint translation does not separate into them.

    `most` is the setting `max_pieces`. A cut translation is rejected, because the ends of its last lines are missing,
    and one that is astray, because its lines may translate other lines of the source.
    """
    limits = trained_on.limits(segment.pieces, segment.task, most)
    ended = math.isfinite(joint.score) and not joint.cut and not joint.astray
    parts = split_lines(tokenizer, joint.pieces, len(limits)) if ended else None
    return [
        replace(joint, text=text, pieces=pieces, together=len(limits), cut=len(pieces) >= limit)
        for (text, pieces), limit in zip(parts or (), limits, strict=False)
    ]
