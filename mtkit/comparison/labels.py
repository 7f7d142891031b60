"""Label placement in a scatter plot: no label overlaps another label or a dot."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

DIRECTIONS = 24
"""Number of directions around a dot in which a label is tried at each distance."""
NEAREST, STEP, RINGS = 9.0, 7.0, 60
"""Distances from a dot to its label: smallest and step in pixels, and their number."""


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    width: float
    height: float

    def meets(self, other: "Box") -> bool:
        """Return whether the boxes overlap by more than an edge."""
        apart = (
            self.left >= other.left + other.width
            or other.left >= self.left + self.width
            or self.bottom >= other.bottom + other.height
            or other.bottom >= self.bottom + self.height
        )
        return not apart

    def within(self, other: "Box") -> bool:
        """Return whether this box lies inside the other."""
        return (
            self.left >= other.left
            and self.bottom >= other.bottom
            and self.left + self.width <= other.left + other.width
            and self.bottom + self.height <= other.bottom + other.height
        )


def label_places(
    dots: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box, radius: float
) -> list[Box]:
    """Place a box for each label, near its dot and inside the frame, without overlap with other boxes and dots.

    Sizes, `frame` and the `radius` of the dots are in pixels. The most crowded dots come first, because they have the
    fewest free places. A label without a free place is put to the right of its dot.
    """
    discs = [Box(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in dots]
    crowding = [sum(1 / (1 + math.dist(dot, other)) for other in dots) for dot in dots]
    placed: dict[int, Box] = {}
    for number in sorted(range(len(dots)), key=lambda index: -crowding[index]):
        candidates = list(_around(dots[number], sizes[number]))
        taken = [*discs, *placed.values()]
        free = (box for box in candidates if box.within(frame) and not any(box.meets(other) for other in taken))
        placed[number] = next(free, candidates[0])
    return [placed[number] for number in range(len(dots))]


def _around(dot: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Yield boxes around a dot, the nearest first; at each distance, boxes on the right first."""
    width, height = size
    turns = sorted(range(DIRECTIONS), key=lambda index: min(index, DIRECTIONS - index))
    for ring in range(RINGS):
        distance = NEAREST + ring * STEP
        for turn in turns:
            angle = 2 * math.pi * turn / DIRECTIONS
            x, y = dot[0] + distance * math.cos(angle), dot[1] + distance * math.sin(angle)
            # the box lies on the side of (x, y) that is away from the dot
            yield Box(x - width * (1 - math.cos(angle)) / 2, y - height * (1 - math.sin(angle)) / 2, width, height)
