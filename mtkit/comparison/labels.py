"""Places for the labels of dots in a picture, so that no label lies on another or on a dot."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

DIRECTIONS = 24
"""Around a dot, in which a label is tried at each distance."""
NEAREST, STEP, RINGS = 9.0, 7.0, 60
"""Distances from a dot to its label in pixels: the first, from one to the next, and their number."""


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    width: float
    height: float

    def meets(self, other: "Box") -> bool:
        """Whether the two have more than an edge in common."""
        apart = (
            self.left >= other.left + other.width
            or other.left >= self.left + self.width
            or self.bottom >= other.bottom + other.height
            or other.bottom >= self.bottom + self.height
        )
        return not apart

    def within(self, other: "Box") -> bool:
        """Whether it lies inside the other."""
        return (
            self.left >= other.left
            and self.bottom >= other.bottom
            and self.left + self.width <= other.left + other.width
            and self.bottom + self.height <= other.bottom + other.height
        )


def label_places(
    dots: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box, radius: float
) -> list[Box]:
    """A box of each size, near its dot and inside the frame, that meets no other box and no dot of that radius.

    Dots in the thick of others come first, since they have the fewest places. A label for which there is none is put
    beside its dot.
    """
    discs = [Box(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in dots]
    crowding = [sum(1 / (1 + math.dist(dot, other)) for other in dots) for dot in dots]
    found: dict[int, Box] = {}
    for number in sorted(range(len(dots)), key=lambda each: -crowding[each]):
        tried = list(_around(dots[number], sizes[number]))
        taken = [*discs, *found.values()]
        free = (box for box in tried if box.within(frame) and not any(box.meets(other) for other in taken))
        found[number] = next(free, tried[0])
    return [found[number] for number in range(len(dots))]


def _around(dot: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Boxes around a dot, the nearest first; at each distance those to the right first."""
    width, height = size
    turns = sorted(range(DIRECTIONS), key=lambda each: min(each, DIRECTIONS - each))
    for ring in range(RINGS):
        distance = NEAREST + ring * STEP
        for turn in turns:
            angle = 2 * math.pi * turn / DIRECTIONS
            x, y = dot[0] + distance * math.cos(angle), dot[1] + distance * math.sin(angle)
            # the box lies on the far side of the point
            yield Box(x - width * (1 - math.cos(angle)) / 2, y - height * (1 - math.sin(angle)) / 2, width, height)
