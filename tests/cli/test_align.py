import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtkit.cli.align import _table
from mtkit.cli.app import app
from mtkit.decoding.alignment import Alignment
from mtkit.errors import MtkitError
from mtkit.evaluation.pictures import attention as attention_maps
from tests.decoding.trained import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    return make_run(tmp_path_factory.mktemp("runs"), attention="additive", architecture="rnn").run.folder


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["align", *arguments])


def test_a_table_and_a_picture(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "boy.png"
    result = call("the boy sleeps", "--run", str(folder), "--target", "der Junge", "--output", str(picture))
    assert result.exit_code == 0, result.output
    head, *rows, blank, last = result.output.splitlines()
    assert head.split() == ["piece", "source", "pieces", "and", "their", "weights"]
    assert rows[-1].startswith("</s>")
    assert (blank, last) == ("", str(picture))
    assert picture.exists()


def test_without_a_target_the_runs_own_translation_is_aligned(folder: Path, tmp_path: Path) -> None:
    result = call("the boy sleeps", "--run", str(folder), "--output", str(tmp_path / "boy.png"))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("text", ["", "two\nlines"])
def test_what_is_not_one_line_is_refused(folder: Path, text: str, tmp_path: Path) -> None:
    result = call(text, "--run", str(folder), "--output", str(tmp_path / "boy.png"))
    assert isinstance(result.exception, MtkitError)
    assert not list(tmp_path.iterdir())


def test_of_a_long_text_the_beginning_is_shown(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alignment.first, "__defaults__", (3,))
    monkeypatch.setattr(Alignment.left_out, "__defaults__", (3,))
    output = ["--run", str(folder), "--target", "der", "--output", str(tmp_path / "a.png")]
    result = call("the boy sleeps", *output)
    assert re.search(r"only the first 3 of \d+ source pieces are shown\n", result.stderr), result.stderr
    rows = result.stdout.splitlines()[1:-2]
    assert 1 < len(rows) <= 3
    assert not any("</s>" in cell for row in rows for cell in row.split()[1:])


def test_the_first_pieces_have_their_weights() -> None:
    layers = {"encoder": [torch.rand(2, 9, 9), None], "decoder": [torch.rand(2, 5, 5)], "cross": [torch.rand(2, 5, 9)]}
    cut = Alignment(list("abcdefghi"), list("vwxyz"), layers).first(6)
    assert ("".join(cut.source), "".join(cut.target), cut.read) == ("abcdef", "vwxyz", ["<s>", *"vwxy"])
    for role, rows, columns in (("encoder", 6, 6), ("decoder", 5, 5), ("cross", 5, 6)):
        assert torch.equal(cut.layers[role][0], layers[role][0][:, :rows, :columns])  # type: ignore[index, arg-type]
    assert Alignment(list("abc"), list("xy"), layers).left_out(3) == ""
    assert Alignment(list("abc"), list("xy"), layers).left_out(1) == (
        "only the first 1 of 3 source pieces and 1 of 2 target pieces are shown"
    )


def test_columns_of_wide_letters_are_aligned() -> None:
    """A Japanese letter takes two cells of a terminal, a combining mark none."""
    rows = Alignment(
        source=["▁a", "b"], target=["▁日本", "e\u0301", "</s>"], layers={"cross": [torch.full((1, 3, 2), 0.5)]}
    )
    assert [line.split("  ")[0] for line in _table(rows).splitlines()[1:]] == ["▁日本", "e\u0301", "</s>"]
    assert [line.index("▁a") for line in _table(rows).splitlines()[1:]] == [5, 8, 7]


def test_maps_of_every_layer_and_head(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run, picture = make_run(tmp_path).run.folder, tmp_path / "map.png"
    arguments = ["plot", "attention", "--run", str(run), "--output", str(picture)]
    result = CliRunner().invoke(app, [*arguments, "--source", "the $a$ boy", "--target", "der Junge"])
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    result = CliRunner().invoke(app, [*arguments, "--source", " "])
    assert isinstance(result.exception, MtkitError)
    assert not picture.exists()


def test_a_row_of_maps_is_a_layer_that_has_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells of each map are the weights of its head, under its name; layers without weights have no row."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(attention_maps, "save_figure", lambda figure, path: drawn.append(figure) or True)
    cross, encoder = torch.rand(2, 3, 2), torch.rand(1, 2, 2)
    aligned = Alignment(["犬", "</s>"], ["the", "dog", "</s>"], {"encoder": [encoder], "cross": [None, cross]})
    assert attention_maps.draw_attention(aligned, tmp_path / "map.png")
    maps = {axes.get_xlabel(): axes for axes in drawn[0].axes if axes.images}
    assert list(maps) == ["cross, layer 2, head 1", "cross, layer 2, head 2", "encoder, layer 1, head 1"]
    for head in range(2):
        axes = maps[f"cross, layer 2, head {head + 1}"]
        torch.testing.assert_close(torch.tensor(axes.images[0].get_array(), dtype=torch.float32), cross[head])
    assert [each.get_text() for each in axes.get_yticklabels()] == aligned.target
    with pytest.raises(MtkitError, match="too large"):
        attention_maps.draw_attention(
            Alignment(["a"] * 999, ["b"] * 999, {"cross": [torch.rand(8, 999, 999)]}), tmp_path
        )
