from pathlib import Path

import pytest

from mtkit.errors import MtkitError
from mtkit.experiments.pictures.draw import PICTURES, draw_all
from mtkit.experiments.pictures.ranks import Ranks
from tests.experiments.pictures.points import many, point

pytest.importorskip("matplotlib")


def is_image(path: Path) -> bool:
    from matplotlib.image import imread

    height, width, _ = imread(path).shape
    return height > 100 and width > 500


@pytest.mark.parametrize(("count", "seeds"), [(1, 1), (2, 3), (79, 1)])
def test_all_pictures_open(tmp_path: Path, count: int, seeds: int) -> None:
    points = many(count, seeds)
    ranks = Ranks([each.name for each in points], [number + 1.0 for number in range(count)], 2.0, [], seeds)
    paths = draw_all(points, ranks, tmp_path)
    expected = [name for name in PICTURES if count > 1 or name != "compare-ranks.png"]
    assert sorted(path.name for path in paths) == sorted(expected)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(expected)
    assert all(map(is_image, paths))


def test_pictures_without_measurements_are_removed(tmp_path: Path) -> None:
    (tmp_path / "compare-flops.png").write_bytes(b"of an earlier study")
    assert draw_all([point("full", 3.0, costs={"minutes": 1.0})], None, tmp_path) == [
        tmp_path / "compare.png",
        tmp_path / "compare-minutes.png",
    ]
    assert not (tmp_path / "compare-flops.png").exists()
    assert draw_all([], None, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = ["复制[种子=1]", "a$b_c$d", "ø" * 90, ""]
    points = [point(name, 30.0 + number, costs={"minutes": 1.0}) for number, name in enumerate(names)]
    assert len(draw_all(points, None, tmp_path, metric="chrF", title="任务 $x")) == 2


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "compare-minutes.png").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MtkitError, match="is a link"):
        draw_all([point("full", 3.0)], None, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["compare-minutes.png"]
