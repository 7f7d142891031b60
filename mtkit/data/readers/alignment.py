"""Where two sides of a corpus stop matching because a line is missing in one of them."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_ENOUGH = 6.0
"""Evidence at which a shift counts as found: a dozen lines of natural text, where the sides are off by one."""

_BEYOND_CHANCE = 3.0
"""How many times the evidence must be what it came to at most for shifts by more lines, which nobody looks for."""

_FAR = (3, 5)
"""Such shifts: near enough that neighbours in a text have as much in common."""

_ALLOWANCE = 0.1
"""Evidence for a shift, a line, that is put down to chance. On natural text that matches, the evidence is -0.3 to -1.1
a line, and as much above zero where the sides are off by one."""

_LENGTH = 1.5
"""Most that the lengths of two segments can speak against them."""


def first_suspicious(pairs: Iterable[tuple[str, str]]) -> int | None:
    """The line, from 1, from where on lines match their neighbour's translation better than their own; None if none.

    Two segments match by their lengths, the words that stand in both (names, numbers, markup), and their last
    character. The evidence that the sides are off by one is summed line by line, and starts anew at zero whenever it
    falls below (the CUSUM test: Page, Biometrika 1954, https://doi.org/10.2307/2333009): where it grows past a bound,
    it began to grow at about the first line that is off. The answer is mostly good to within a few lines.
    Where sides say little about each other, as a task's codes and labels, such sums wander: so do those for shifts by
    more lines, and what they come to by chance is no evidence. Sides that are off by several lines at once may so be
    taken for sides that match.
    """
    evidence = {(side, shift): 0.0 for side in ("source", "target") for shift in (1, *_FAR)}
    began = {"source": 1, "target": 1}
    by_chance = 0.0
    ratio = 0.0  # how much longer sources are than targets on average, as a logarithm
    for number, window in enumerate(_windows(pairs), start=1):
        (source, target), following = window[0], window[1]
        ratio += (source.length - target.length - ratio) / (number + 1)
        straight = (_match(source, target, ratio) + _match(*following, ratio)) / 2
        for (side, shift), before in evidence.items():
            if shift < len(window):
                other = (source, window[shift][1]) if side == "source" else (window[shift][0], target)
                evidence[side, shift] = max(0.0, before + _match(*other, ratio) - straight - _ALLOWANCE)
        by_chance = max(by_chance, *(most for (_, shift), most in evidence.items() if shift != 1))
        for side, line in began.items():
            if evidence[side, 1] == 0.0:
                began[side] = number + 1
            elif evidence[side, 1] > max(_ENOUGH, _BEYOND_CHANCE * by_chance):
                return line
    return None


def _windows(pairs: Iterable[tuple[str, str]]) -> Iterator[Sequence[tuple["_Segment", "_Segment"]]]:
    """Each pair but the last with those behind it that a shift may reach."""
    window: deque[tuple[_Segment, _Segment]] = deque()
    for source, target in pairs:
        window.append((_Segment.of(source), _Segment.of(target)))
        if len(window) > _FAR[-1]:
            yield window
            window.popleft()
    while len(window) > 1:
        yield window
        window.popleft()


class _Segment(NamedTuple):
    length: float
    words: frozenset[str]
    last: str

    @classmethod
    def of(cls, text: str) -> "_Segment":
        # a few characters more on both sides make the ratio of short lengths less wild
        return cls(math.log(len(text) + 8), frozenset(text.split()), text.rstrip()[-1:])


def _match(source: _Segment, target: _Segment, ratio: float) -> float:
    """How well two segments go together: more for common words and the same end, less the further lengths part."""
    apart = 2 * abs(source.length - target.length - ratio)
    same_end = 0.5 if source.last == target.last else 0.0
    score = same_end - (apart if apart < _LENGTH else _LENGTH)
    if source.words.isdisjoint(target.words):  # as nearly all are
        return score
    return score + 2 * len(source.words & target.words) / min(len(source.words), len(target.words))
