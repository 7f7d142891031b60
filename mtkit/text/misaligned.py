"""Finds the line from which on the two sides of a corpus are off by one line."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_THRESHOLD = 6.0
"""Evidence from which on a shift counts as detected: a dozen lines of natural text whose sides are off by one."""

_BEYOND_CHANCE = 3.0
"""Minimum ratio of this evidence to the maximum evidence for `_FAR` shifts, which measures chance."""

_FAR = (3, 5)
"""Shifts that are not searched for, but near enough that neighbours in a text have as much in common."""

_ALLOWANCE = 0.1
"""Evidence per line that is put down to chance. On natural text whose sides match, the evidence is -0.3 to -1.1 a line,
and as much above zero if the sides are off by one."""

_LENGTH_PENALTY = 1.5
"""Maximum penalty for the lengths of two segments."""


def first_suspicious(pairs: Iterable[tuple[str, str]]) -> int | None:
    """Return the line, from 1, from which on lines match their neighbour's translation better than their own, or None.

    Two segments match by their lengths, the words that both have (names, numbers, markup), and their last character.
    The evidence that the sides are off by one is summed line by line, and restarts at zero when it becomes negative
    (the CUSUM test: Page, Biometrika 1954, https://doi.org/10.2307/2333009). When it exceeds a threshold, it began to
    grow at about the first line that is off; the answer is mostly good to within a few lines.
    If the sides have little in common, as a task's codes and labels, such sums wander by chance. Sums for shifts by
    more lines then wander as far, so evidence must exceed them. Sides that are off by several lines at once may
    therefore pass as matching.
    """
    evidence = {(side, shift): 0.0 for side in ("source", "target") for shift in (1, *_FAR)}
    began = {"source": 1, "target": 1}
    by_chance = 0.0
    ratio = 0.0  # mean of the source's log length minus the target's
    for number, window in enumerate(_windows(pairs), start=1):
        (source, target), following = window[0], window[1]
        ratio += (source.length - target.length - ratio) / (number + 1)
        straight = (_match(source, target, ratio) + _match(*following, ratio)) / 2
        for (side, shift), total in evidence.items():
            if shift < len(window):
                other = (source, window[shift][1]) if side == "source" else (window[shift][0], target)
                evidence[side, shift] = max(0.0, total + _match(*other, ratio) - straight - _ALLOWANCE)
        by_chance = max(by_chance, *(total for (_, shift), total in evidence.items() if shift != 1))
        for side, line in began.items():
            if evidence[side, 1] == 0.0:
                began[side] = number + 1
            elif evidence[side, 1] > max(_THRESHOLD, _BEYOND_CHANCE * by_chance):
                return line
    return None


class _Segment(NamedTuple):
    length: float
    words: frozenset[str]
    last: str


def _windows(pairs: Iterable[tuple[str, str]]) -> Iterator[Sequence[tuple[_Segment, _Segment]]]:
    """Yield each pair but the last with the following pairs, as far as the largest shift reaches."""

    def segment(text: str) -> _Segment:
        # a few characters more on both sides make the ratio of short lengths less extreme
        return _Segment(math.log(len(text) + 8), frozenset(text.split()), text.rstrip()[-1:])

    window: deque[tuple[_Segment, _Segment]] = deque()
    for source, target in pairs:
        window.append((segment(source), segment(target)))
        if len(window) > _FAR[-1]:
            yield window
            window.popleft()
    while len(window) > 1:
        yield window
        window.popleft()


def _match(source: _Segment, target: _Segment, ratio: float) -> float:
    """Score two segments: higher for common words and the same end, lower the more their lengths differ."""
    penalty = 2 * abs(source.length - target.length - ratio)
    same_end = 0.5 if source.last == target.last else 0.0
    score = same_end - (penalty if penalty < _LENGTH_PENALTY else _LENGTH_PENALTY)
    if source.words.isdisjoint(target.words):  # the usual case
        return score
    return score + 2 * len(source.words & target.words) / min(len(source.words), len(target.words))
