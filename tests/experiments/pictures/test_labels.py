import random
from itertools import combinations

import pytest

from mtkit.experiments.pictures.labels import Box, label_places

FRAME = Box(0, 0, 1500, 1100)


@pytest.mark.parametrize("spread", [1.0, 0.2, 0.05])
def test_labels_of_sixty_dots_meet_neither_each_other_nor_a_dot(spread: float) -> None:
    draw = random.Random(3)
    dots = [(750 + spread * draw.uniform(-700, 700), 550 + spread * draw.uniform(-500, 500)) for _ in range(61)]
    sizes = {index: (draw.uniform(40, 160), 18.0) for index in range(61)}
    placed = label_places(dots, sizes, FRAME, 10.0)
    assert {index: (box.width, box.height) for index, box in placed.items()} == sizes
    assert all(box.within(FRAME) for box in placed.values())
    assert not [pair for pair in combinations(placed.values(), 2) if pair[0].meets(pair[1])]
    discs = [Box(x - 10, y - 10, 20, 20) for x, y in dots]
    assert not [(box, disc) for box in placed.values() for disc in discs if box.meets(disc)]


def test_a_lone_label_is_right_of_its_dot() -> None:
    (box,) = label_places([(100.0, 200.0)], {0: (50.0, 10.0)}, FRAME, 5.0).values()
    assert 105 <= box.left <= 110
    assert box.bottom == 195


def test_a_label_without_a_free_place_is_left_out() -> None:
    tight = Box(0, 0, 20, 20)
    assert label_places([(10.0, 10.0)] * 3, {1: (50.0, 10.0)}, tight, 5.0) == {}


def test_only_some_dots_have_labels_but_all_are_kept_free() -> None:
    dots = [(100.0, 200.0), (120.0, 200.0)]
    placed = label_places(dots, {0: (50.0, 10.0)}, FRAME, 5.0)
    assert list(placed) == [0]
    assert not placed[0].meets(Box(115, 195, 10, 10))


def test_taken_boxes_stay_free_and_rings_limit_the_distance() -> None:
    wall = Box(0, 150, 1000, 100)
    far = label_places([(100.0, 200.0)], {0: (50.0, 10.0)}, FRAME, 5.0, taken=[wall])
    assert not far[0].meets(wall)
    assert label_places([(100.0, 200.0)], {0: (50.0, 10.0)}, FRAME, 5.0, taken=[wall], rings=2) == {}


def test_avoided_boxes_stay_free_if_there_is_another_place_near_the_dot() -> None:
    line = Box(100, 198, 1000, 4)
    (box,) = label_places([(100.0, 200.0)], {0: (50.0, 10.0)}, FRAME, 5.0, avoided=[line]).values()
    assert not box.meets(line)
    (everywhere,) = label_places([(100.0, 200.0)], {0: (50.0, 10.0)}, FRAME, 5.0, avoided=[FRAME]).values()
    assert everywhere.left < 110
    assert everywhere.bottom == 195


def test_a_box_around_a_line_is_wider_than_the_line() -> None:
    assert Box.around([(3.0, 9.0), (3.0, 1.0)]) == Box(1, -1, 4, 12)
    assert Box(0, 0, 2, 2).nearest(5, 1) == (2, 1)
