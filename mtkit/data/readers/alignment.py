"""Where two sides of a corpus stop matching because a line is missing in one of them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

_ENOUGH = 6.0
"""Evidence at which a shift counts as found: a dozen lines of natural text, where the sides are off by one."""

_ALLOWANCE = 0.1
"""Evidence for a shift, a line, that is put down to chance. On natural text that matches, the evidence is -0.3 to -1.1
a line, and as much above zero where the sides are off by one; near zero, they say nothing about each other."""

_LENGTH = 1.5
"""Most that the lengths of two segments can speak against them."""


def first_suspicious(pairs: Iterable[tuple[str, str]]) -> int | None:
    """The line, from 1, from where on lines match their neighbour's translation better than their own; None if none.

    Two segments match by their lengths, the words that stand in both (names, numbers, markup), and their last
    character. The evidence that the sides are off by one is summed line by line, and starts anew at zero whenever it
    falls below (the CUSUM test: Page, Biometrika 1954, https://doi.org/10.2307/2333009): where it grows past a bound,
    it began to grow at about the first line that is off. The answer is mostly good to within a few lines.
    Sides of which neither lengths nor words say anything about each other may be suspected anywhere.
    """
    evidence = {"source": 0.0, "target": 0.0}
    began = {"source": 1, "target": 1}
    ratio = 0.0  # how much longer sources are than targets on average, as a logarithm
    segments = ((_Segment.of(source), _Segment.of(target)) for source, target in pairs)
    for number, ((source, target), (next_source, next_target)) in enumerate(pairwise(segments), start=1):
        ratio += (source.length - target.length - ratio) / (number + 1)
        straight = (_match(source, target, ratio) + _match(next_source, next_target, ratio)) / 2
        shifted = {"source": _match(source, next_target, ratio), "target": _match(next_source, target, ratio)}
        for side, match in shifted.items():
            evidence[side] += match - straight - _ALLOWANCE
            if evidence[side] <= 0:
                evidence[side], began[side] = 0.0, number + 1
            if evidence[side] > _ENOUGH:
                return began[side]
    return None


@dataclass(frozen=True)
class _Segment:
    length: float
    words: frozenset[str]
    last: str

    @classmethod
    def of(cls, text: str) -> "_Segment":
        # a few characters more on both sides make the ratio of short lengths less wild
        return cls(math.log(len(text) + 8), frozenset(text.split()), text.rstrip()[-1:])


def _match(source: _Segment, target: _Segment, ratio: float) -> float:
    """How well two segments go together: more for common words and the same end, less the further lengths part."""
    common = len(source.words & target.words) / (min(len(source.words), len(target.words)) or 1)
    apart = 2 * abs(source.length - target.length - ratio)
    return 2 * common + 0.5 * (source.last == target.last) - min(apart, _LENGTH)
