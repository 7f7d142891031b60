import warnings
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from mtkit.attention import mechanisms
from mtkit.attention.registry import OTHERS
from mtkit.errors import MtkitError
from mtkit.experiments.pictures.canvas import (
    LONGEST,
    MIXED,
    STYLES,
    entitle,
    new_figure,
    save,
    shortened,
    style_of,
    styled,
)
from mtkit.experiments.pictures.curves import LINES

pytest.importorskip("matplotlib")

DICHROMATS = {
    "none": np.eye(3),
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanope": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Linear RGB as these people see it: Machado, Oliveira and Fernandes (2009), severity 1."""


def lab(color: str, seen: np.ndarray) -> np.ndarray:
    """The CIELAB coordinates (3,) of a colour of sRGB, as seen, under D65."""
    rgb = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = seen @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    share = xyz @ np.clip(linear, 0, 1) / xyz.sum(1)
    x, y, z = np.where(share > 216 / 24389, np.cbrt(share), (24389 / 27 * share + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_the_conversion_to_lab() -> None:
    assert lab("#ffffff", np.eye(3)) == pytest.approx([100, 0, 0], abs=0.01)
    assert lab("#ff0000", np.eye(3)) == pytest.approx([53.24, 80.09, 67.20], abs=0.05)


def test_every_family_has_a_colour_and_a_marker() -> None:
    assert {each.family for each in mechanisms().values()} | {OTHERS, MIXED} == set(STYLES)
    assert len({(color, marker) for color, marker in STYLES.values()}) == len(STYLES)
    assert style_of(None) == STYLES[MIXED]
    assert style_of("a family of another package") == STYLES[OTHERS]


@pytest.mark.parametrize("seen", DICHROMATS.values(), ids=DICHROMATS)
@pytest.mark.parametrize("styles", [list(STYLES.values()), [STYLES["scoring"], *LINES]], ids=["families", "lines"])
def test_colours_differ_for_everyone(styles: list[tuple[str, str]], seen: np.ndarray) -> None:
    colors = [lab(color, seen) for color, _ in styles]
    assert min(float(np.linalg.norm(one - other)) for one, other in combinations(colors, 2)) > 18


def test_long_names_keep_both_ends() -> None:
    kept, long = "a" * LONGEST, "begin" + "a" * 100 + "end"
    found = shortened([kept, long])
    assert found[kept] == kept
    assert len(found[long]) <= LONGEST
    assert found[long].startswith("begina")
    assert found[long].endswith("aend")


def test_wide_letters_count_as_two() -> None:
    (name,) = shortened(["長い名前" * 20]).values()
    assert LONGEST // 2 - 3 < len(name) <= LONGEST // 2
    figure = new_figure(4, 2)
    entitle(figure, "", "名前, " * 40)
    assert max(map(len, figure.get_supxlabel().split("\n"))) <= 45


def test_different_names_stay_different() -> None:
    names = [f"band[window_radius=16,positions={kind}]+norm=post+preset=small@encoder" for kind in ("rotary", "alibi")]
    assert len(set(shortened(names).values())) == 2


def test_a_figure_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    assert save(new_figure(2, 2), tmp_path / "a.png") == tmp_path / "a.png"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(MtkitError, match="cannot write"):
        save(new_figure(2, 2), tmp_path / "file" / "a.png")


def test_the_style_ends_with_the_block_and_has_fonts_for_the_letters(tmp_path: Path) -> None:
    """STIXGeneral, which comes with matplotlib, has a letter that DejaVu Sans lacks."""
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with styled(["\u1d81"]):
        figure = new_figure(4, 2)
        entitle(figure, "\u1d81 $x_1$", "", "a note")
        assert len(figure.get_suptitle() and mpl.rcParams["font.family"]) > 1
        save(figure, tmp_path / "a.png")
    assert dict(mpl.rcParams) == before
    assert figure.get_supxlabel() == "a note"


def test_letters_of_no_font_give_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with styled(["\u0378"]):
            figure = new_figure(4, 2)
            entitle(figure, "\u0378")
            save(figure, tmp_path / "a.png")
