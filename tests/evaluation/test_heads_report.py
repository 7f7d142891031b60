from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.errors import MtkitError
from mtkit.evaluation.heads import Heads, LayerHeads
from mtkit.evaluation.heads_report import draw_heads, heads_table

NAN = float("nan")


def layer(role: str, number: int = 1, heads: int = 2, **values: Any) -> LayerHeads:
    return LayerHeads(role, number, "full", heads, **values)


def heads(*layers: LayerHeads) -> Heads:
    return Heads(list(layers), 7, 70, 1.5)


def test_a_row_for_each_head() -> None:
    learned = {
        "span": torch.tensor([3.0, 12.345]),
        "share": torch.tensor([0.5]),
        "use": torch.tensor([[NAN, NAN], [0.25, 0.75]]),
        "bias by distance": torch.tensor([[-1.0, 0.0, 2.0, 0.0, 0.5]] * 2),
    }
    costs = {"cost": torch.tensor([0.01, -0.002]), "cost_error": torch.tensor([0.001, 0.002])}
    one = layer("encoder", learned=learned, **costs)
    two = layer("cross", entropy=torch.tensor([1.0, 2.0, 3.0]), distance=torch.tensor([1.0, 2.0, 3.0]))
    head, *rows = (line.split("  ") for line in heads_table(heads(one, two)).splitlines())
    names = [name.strip() for name in head if name]
    assert names == ["role", "layer", "mechanism", "head", "cost", "entropy", "distance", *learned]
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert cells[0] == ["encoder", "1", "full", "1", "0.0100 ± 0.0010", "3", "0.5", "-1 to 2"]
    assert cells[1] == ["encoder", "1", "full", "2", "-0.0020 ± 0.0020", "12.3", "0.5", "0.25 0.75", "-1 to 2"]
    assert [row[:2] + row[3:] for row in cells[2:]] == [["cross", "1", str(n), str(n), str(n)] for n in (1, 2, 3)]


def panels(made: Heads, monkeypatch: pytest.MonkeyPatch, path: Path) -> list[Any]:
    """The axes of the picture that have an image of numbers."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    subplots = figures.Figure.subplots
    monkeypatch.setattr(figures.Figure, "subplots", lambda *a, **k: drawn.append(made := subplots(*a, **k)) or made)
    draw_heads(made, "run", path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return [axes for axes in drawn[0].flat if axes.images]


def test_layers_go_down_and_heads_across(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    costs = [
        layer("decoder", n, cost=torch.tensor([0.1 * n, -0.2]), cost_error=torch.tensor([0.01, 0.15])) for n in (1, 2)
    ]
    (axes,) = panels(heads(*costs), monkeypatch, tmp_path / "a.png")
    assert axes.images[0].get_array().flatten().tolist() == pytest.approx([0.1, -0.2, 0.2, -0.2])
    assert [text.get_text() for text in axes.texts] == [
        "0.100",
        "(-0.200)",
        "0.200",
        "(-0.200)",
    ]
    assert axes.images[0].get_clim() == pytest.approx((-0.2, 0.2))


def test_several_numbers_of_a_head_go_across(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bias = torch.tensor([[0.0, 1.0, 2.0], [NAN, NAN, NAN], [3.0, 4.0, 5.0]])
    (axes,) = panels(heads(layer("encoder", learned={"bias by distance": bias})), monkeypatch, tmp_path / "a.png")
    assert axes.images[0].get_array().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1.1", "1.3"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["-1", "0", "1"]


def test_biases_of_different_widths_have_distance_0_in_one_column(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers = [
        layer("encoder", n, heads=1, learned={"bias by distance": torch.arange(-n, n + 1.0)[None]}) for n in (1, 2)
    ]
    (axes,) = panels(heads(*layers), monkeypatch, tmp_path / "a.png")
    assert axes.images[0].get_array().tolist() == [[None, -1, 0, 1, None], [-2, -1, 0, 1, 2]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["-2", "-1", "0", "1", "2"]


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_equal_numbers_have_a_scale(value: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    learned = {"span": torch.full((2,), value), "use": torch.full((2, 5), value)}
    for axes in panels(heads(layer("encoder", learned=learned)), monkeypatch, tmp_path / "a.png"):
        low, high = axes.images[0].get_clim()
        assert low < high
        assert low <= value <= high


def test_shared_numbers_stand_in_every_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    learned = {"share of dot": torch.tensor([0.25])}
    (axes,) = panels(heads(layer("encoder", heads=3, learned=learned)), monkeypatch, tmp_path / "a.png")
    assert axes.images[0].get_array().tolist() == [[0.25] * 3]


def test_a_mechanism_without_heads_has_one_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = layer("decoder", 1, heads=1, cost=torch.tensor([0.1]), cost_error=torch.tensor([0.01]))
    two = layer("decoder", 2, cost=torch.tensor([0.2, 0.3]), cost_error=torch.tensor([0.01, 0.2]))
    (axes,) = panels(heads(one, two), monkeypatch, tmp_path / "a.png")
    assert [text.get_text() for text in axes.texts] == ["0.100", "0.200", "(0.300)"]


def test_long_names_leave_the_cells_their_width(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "full:2 + multi-scale + rotary + convolution:3 + memory-compressed:3"
    layers = [LayerHeads(role, 1, name, 8, cost=torch.rand(8)) for role in ("encoder", "decoder", "cross")]
    for axes in panels(heads(*layers), monkeypatch, tmp_path / "a.png"):
        assert axes.get_window_extent().width > 8 * 0.35 * 100  # 100 pixels per inch


@pytest.mark.parametrize("name", ["transformer-base", "a" * 99, "系" * 40])
def test_a_long_title_stays_within_the_picture(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    suptitle = figures.Figure.suptitle
    monkeypatch.setattr(figures.Figure, "suptitle", lambda *a, **k: drawn.append(made := suptitle(*a, **k)) or made)
    one = layer("cross", cost=torch.tensor([0.1, 0.2]), cost_error=torch.tensor([0.01, 0.02]))
    draw_heads(heads(one), f"{name}, update-00001234, 200 validation segments, loss 2.345", tmp_path / "a.png")
    (title,) = drawn
    place, figure = title.get_window_extent(), title.get_figure()
    assert 0 <= place.x0 < place.x1 <= figure.bbox.x1


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(MtkitError, match="there is nothing to draw"):
        draw_heads(heads(layer("encoder")), "run", tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_letters_of_the_title_without_a_font_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = heads(layer("encoder", learned={"span": torch.ones(2)}))
    assert draw_heads(one, "run", tmp_path / "a.png")
    assert not draw_heads(one, "\u0378", tmp_path / "a.png")  # an unassigned letter


def test_what_is_too_large_to_draw_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(MtkitError, match="too large to draw; use --json"):
        draw_heads(heads(layer("encoder", learned={"span": torch.ones(2000)})), "run", tmp_path / "a.png")
