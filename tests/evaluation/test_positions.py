"""Tables of position encodings against their papers' formulas, and their picture."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.errors import MtkitError
from mtkit.evaluation.positions import Encoding, draw_positions, encodings_of
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import make_recipe

D, H = 32, 4


def network(positions: str = "none", architecture: str = "transformer", **options: Any) -> Network:
    recipe = make_recipe(
        {
            "model": {"d_model": D, "heads": H, "positions": positions, "max_length": 50, "architecture": architecture},
            "attention": {"options": options},
        }
    )
    return build_model(recipe, source_vocabulary=8, target_vocabulary=8)


def test_sinusoidal_positions_are_those_of_the_paper() -> None:
    (encoding,) = encodings_of(network("sinusoidal"), 20)
    assert (encoding.name, encoding.first) == ("sinusoidal positions: source and target", 0)
    expected = [
        [(math.cos if d % 2 else math.sin)(p / 10_000 ** ((d - d % 2) / D)) for d in range(D)] for p in range(20)
    ]
    torch.testing.assert_close(encoding.table, torch.tensor(expected), atol=1e-6, rtol=1e-5)


def test_concatenated_positions_are_shown_in_their_width() -> None:
    recipe = make_recipe({"model": {"d_model": D, "heads": H, "position_width": 12, "max_length": 50}})
    (encoding,) = encodings_of(build_model(recipe, source_vocabulary=8, target_vocabulary=8), 20)
    assert encoding.name == "sinusoidal positions: source and target"
    assert encoding.table.shape == (20, 12)


def test_learned_positions_differ_by_side_and_end_with_the_model() -> None:
    model = network("learned")
    source, target = encodings_of(model, 100)
    assert [source.name, target.name] == ["learned positions: source", "learned positions: target"]
    assert source.table.shape == (50, D)
    assert torch.equal(target.table, model.target_embedding.positions.table)  # type: ignore[union-attr, arg-type]
    assert not source.table.requires_grad


def test_rotary_positions_are_cosines_and_sines_of_each_pair() -> None:
    (encoding,) = encodings_of(network(**{"decoder.positions": "rotary"}), 20)
    assert encoding.name == "rotary positions: decoder layers 1, 2"
    width = D // H
    for pair in range(width // 2):
        angle = torch.arange(20) * 10_000.0 ** (-2 * pair / width)
        torch.testing.assert_close(encoding.table[:, 2 * pair], angle.cos(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(encoding.table[:, 2 * pair + 1], angle.sin(), atol=1e-5, rtol=1e-4)


def test_rotary_positions_in_halves() -> None:
    (encoding,) = encodings_of(network(**{"encoder.positions": {"name": "rotary", "half": True}}), 5)
    angle = 10_000.0 ** (-torch.arange(4) / 4)
    torch.testing.assert_close(encoding.table[1], torch.cat([angle.cos(), angle.sin()]))


def test_alibi_falls_by_its_slopes() -> None:
    (encoding,) = encodings_of(network(**{"encoder.positions": "alibi", "decoder.positions": "alibi"}), 10)
    assert encoding.name == "ALiBi bias: encoder layers 1, 2; decoder layers 1, 2"
    assert (encoding.first, encoding.columns) == (-9, "head")
    assert encoding.table[-1].tolist() == [0.0] * H
    assert encoding.table[-2].tolist() == [-(2.0**-2), -(2.0**-4), -(2.0**-6), -(2.0**-8)]
    assert encoding.table[0].tolist() == [9 * slope for slope in encoding.table[-2].tolist()]


def test_tables_that_differ_by_layer_are_apart() -> None:
    model = network(**{"encoder.positions": {"name": "shaw", "clip": 3}})
    keys, values = encodings_of(model, 10)
    assert [keys.name, values.name] == [f"Shaw's relative {name}: encoder layers 1, 2" for name in ("keys", "values")]
    assert (keys.first, len(keys.table)) == (-3, 7)
    with torch.no_grad():
        model.encoder[1].attention.positions.keys[4] = 1.0  # type: ignore[index, union-attr, operator]
    names = [encoding.name for encoding in encodings_of(model, 10)]
    assert names == [
        "Shaw's relative keys: encoder layer 1",
        "Shaw's relative values: encoder layers 1, 2",
        "Shaw's relative keys: encoder layer 2",
    ]


def test_a_model_without_positions_is_told_so() -> None:
    for model in (network(), network(architecture="rnn")):
        with pytest.raises(MtkitError, match="this model has no position encodings"):
            encodings_of(model, 10)


def test_lines_and_heat_maps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    subplots = figures.Figure.subplots
    monkeypatch.setattr(figures.Figure, "subplots", lambda *a, **k: drawn.append(axes := subplots(*a, **k)) or axes)
    table = torch.arange(12.0).view(3, 4) - 5
    bias = Encoding("bias", table, -2, "distance j - i", "head")
    waves = Encoding("waves", table, 0, "position", "dimension")
    draw_positions([bias, waves], tmp_path / "a.png", [3, 0, 3])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (heads, heat), (dimensions, _) = drawn[0]
    assert [line.get_label() for line in heads.lines] == [f"head {n}" for n in (1, 2, 3, 4)]
    assert [line.get_label() for line in dimensions.lines] == ["dimension 3", "dimension 0"]
    assert dimensions.lines[0].get_ydata().tolist() == table[:, 3].tolist()
    assert list(heads.lines[0].get_xdata()) == [-2, -1, 0]
    assert heat.images[0].get_clim() == (-6, 6)
    assert heat.images[0].get_extent() == [0.5, 4.5, 0.5, -2.5]


def test_each_of_many_heads_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    subplots = figures.Figure.subplots
    monkeypatch.setattr(figures.Figure, "subplots", lambda *a, **k: drawn.append(axes := subplots(*a, **k)) or axes)
    draw_positions([Encoding("bias", torch.rand(3, 20), -2, "distance j - i", "head")], tmp_path / "a.png")
    lines = drawn[0][0, 0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 16
    assert drawn[0][0, 0].get_title(loc="left") == "bias (first 16 of 20 heads)"


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    waves = Encoding("waves", torch.zeros(3, 4), 0, "position", "dimension")
    with pytest.raises(MtkitError, match="there is no dimension 4: waves has dimensions 0 to 3"):
        draw_positions([waves], tmp_path / "a.png", [4])
    with pytest.raises(MtkitError, match="a picture of 100 encodings is too large to draw"):
        draw_positions([waves] * 100, tmp_path / "a.png")
    draw_positions([waves], tmp_path / "a.png")  # zeros have a scale
