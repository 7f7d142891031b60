import random
from itertools import combinations

import pytest

from mtkit.experiments.plots import Box, label_places

FRAME = Box(0, 0, 1500, 1100)


@pytest.mark.parametrize("spread", [1.0, 0.2, 0.05])
def test_labels_of_sixty_dots_meet_neither_each_other_nor_a_dot(spread: float) -> None:
    draw = random.Random(3)
    dots = [(750 + spread * draw.uniform(-700, 700), 550 + spread * draw.uniform(-500, 500)) for _ in range(61)]
    sizes = [(draw.uniform(40, 160), 18.0) for _ in dots]
    found = label_places(dots, sizes, FRAME, 10.0)
    assert [(box.width, box.height) for box in found] == sizes
    assert all(box.within(FRAME) for box in found)
    assert not [pair for pair in combinations(found, 2) if pair[0].meets(pair[1])]
    discs = [Box(x - 10, y - 10, 20, 20) for x, y in dots]
    assert not [(box, disc) for box in found for disc in discs if box.meets(disc)]


def test_a_lone_label_is_right_of_its_dot() -> None:
    (box,) = label_places([(100.0, 200.0)], [(50.0, 10.0)], FRAME, 5.0)
    assert 105 <= box.left <= 110
    assert box.bottom == 195


def test_where_there_is_no_room_labels_are_beside_their_dots() -> None:
    tight = Box(0, 0, 20, 20)
    found = label_places([(10.0, 10.0)] * 3, [(50.0, 10.0)] * 3, tight, 5.0)
    assert {box.left for box in found} == {19.0}
