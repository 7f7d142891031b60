"""Label placement in a scatter plot: no label overlaps another label or a dot."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

DIRECTIONS = 24
"""Number of directions around a dot in which a label is tried at each distance."""
NEAREST, STEP, RINGS = 9.0, 7.0, 60
"""Distances from a dot to its label: smallest and step in pixels, and their number."""
RINGS_NEAR = 8
"""Number of distances at which a place near the dot is searched."""


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    width: float
    height: float

    @classmethod
    def around(cls, corners: Iterable[Sequence[float]]) -> "Box":
        """Return the smallest box with these corners, 2 pixels wider on each side."""
        xs, ys = zip(*corners, strict=True)
        return cls(min(xs) - 2, min(ys) - 2, max(xs) - min(xs) + 4, max(ys) - min(ys) + 4)

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
        """Return whether this box is inside the other."""
        return (
            self.left >= other.left
            and self.bottom >= other.bottom
            and self.left + self.width <= other.left + other.width
            and self.bottom + self.height <= other.bottom + other.height
        )

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """Return the point of the box that is nearest to (x, y)."""
        return min(max(x, self.left), self.left + self.width), min(max(y, self.bottom), self.bottom + self.height)


def label_places(
    dots: Sequence[tuple[float, float]],
    sizes: Mapping[int, tuple[float, float]],
    frame: Box,
    radius: float,
    *,
    taken: Iterable[Box] = (),
    avoided: Sequence[Box] = (),
    rings: int = RINGS,
) -> dict[int, Box]:
    """Place a box for the label of some dots, inside the frame, without overlap with other boxes and dots.

    `sizes` has the width and height of each label by the index of its dot. Boxes of `taken` stay free, and
    boxes of `avoided` too if there is another place near the dot. The label's distance from its dot is limited by the
    number of `rings`. All lengths are in pixels. The most crowded dots come first, because they have the fewest free
    places. A label without a free place is not in the result.
    """
    occupied = [*taken, *(Box(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in dots)]
    crowding = {index: sum(1 / (1 + math.dist(dots[index], other)) for other in dots) for index in sizes}
    placed: dict[int, Box] = {}
    for index in sorted(sizes, key=lambda index: -crowding[index]):
        near = _free(dots[index], sizes[index], frame, occupied, range(min(rings, RINGS_NEAR)))
        far = _free(dots[index], sizes[index], frame, occupied, range(RINGS_NEAR, rings))
        boxes = list(near)
        best = next((box for box in boxes if not any(box.meets(other) for other in avoided)), None)
        if box := best or next(chain(boxes, far), None):
            placed[index] = box
            occupied.append(box)
    return placed


def _free(
    dot: tuple[float, float], size: tuple[float, float], frame: Box, occupied: Sequence[Box], rings: range
) -> Iterator[Box]:
    """Yield the free boxes around a dot."""
    for box in _around(dot, size, rings):
        if box.within(frame) and not any(box.meets(other) for other in occupied):
            yield box


def _around(dot: tuple[float, float], size: tuple[float, float], rings: range) -> Iterator[Box]:
    """Yield boxes around a dot, the nearest first; at each distance, boxes on the right first."""
    width, height = size
    turns = sorted(range(DIRECTIONS), key=lambda index: min(index, DIRECTIONS - index))
    for ring in rings:
        distance = NEAREST + ring * STEP
        for turn in turns:
            angle = 2 * math.pi * turn / DIRECTIONS
            x, y = dot[0] + distance * math.cos(angle), dot[1] + distance * math.sin(angle)
            # the box lies on the side of (x, y) that is away from the dot
            yield Box(x - width * (1 - math.cos(angle)) / 2, y - height * (1 - math.sin(angle)) / 2, width, height)
