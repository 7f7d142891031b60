import pytest

from mtkit.experiments.pictures.bars import draw_bars
from mtkit.experiments.pictures.canvas import INK
from tests.experiments.pictures.points import drawn, many, point, words

pytest.importorskip("matplotlib")


def test_rows_show_mean_interval_seeds_and_speed_with_the_best_on_top() -> None:
    points = [
        point("full", 30.0, 32.0, low=29.0, high=34.0, costs={"training-speed": 500.0}),
        point("band", 40.0, 40.0, costs={"training-speed": None}),
        point("luna", 10.0, costs={"training-speed": 1500.0}, failed=1),
        point("gone", failed=2),
    ]
    figure = draw_bars(points, "BLEU", "A study")
    quality, speed = figure.axes
    assert [text.get_text() for text in quality.get_yticklabels()] == ["band", "full", "luna"]
    (mean,) = drawn(figure, "full")
    assert (list(mean.get_xdata()), list(mean.get_ydata()), mean.get_color()) == ([31.0], [1], INK)
    assert list(drawn(figure, "interval full")[0].get_xdata()) == [29.0, 34.0]
    assert list(drawn(figure, "seeds full")[0].get_xdata()) == [30.0, 32.0]
    assert list(drawn(figure, "seeds band")[0].get_xdata()) == [40.0, 40.0]
    assert not drawn(figure, "seeds luna")
    assert [bar.get_width() for bar in speed.patches] == [0, 500, 1500]
    shown = words(figure)
    assert all(text in shown for text in ("31.00 ± 1.41", "40.00 ± 0.00", "not measured", "1.5k"))
    assert "Left out: gone (no score); 1 failed trial of luna." in shown


def test_a_lower_loss_is_on_top_and_to_the_right() -> None:
    figure = draw_bars([point("full", 2.0), point("band", 1.0)], "loss", "A study")
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["band", "full"]
    assert figure.axes[0].get_xlim()[0] > figure.axes[0].get_xlim()[1]


def test_one_seed_does_not_cover_the_variance_between_seeds() -> None:
    shown = words(draw_bars([point("full", 2.0)], "BLEU", "A study"))
    assert "does not cover the variance between seeds" in shown
    assert "±" not in shown


def test_without_speeds_there_is_one_panel() -> None:
    figure = draw_bars([point("full", 2.0, costs={}), point("band", 3.0, costs={})], "BLEU", "A study")
    assert len(figure.axes) == 1


def test_the_picture_grows_with_its_rows() -> None:
    heights = [draw_bars(many(count), "BLEU", "A study").get_figheight() for count in (1, 3, 25)]
    assert heights[0] < heights[1]
    assert heights[2] - heights[1] > 22 * 0.2
    assert draw_bars([point("gone", failed=1)], "BLEU", "A study") is None


def test_numbers_of_speeds_are_inside_their_panel() -> None:
    figure = draw_bars(many(8), "BLEU", "A study")
    figure.canvas.draw()
    panel = figure.axes[1]
    assert len(panel.texts) == 8
    assert all(text.get_window_extent().x1 <= panel.get_window_extent().x1 for text in panel.texts)
