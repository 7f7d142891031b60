"""The settings and the data that `mtkit translate` takes from its recipe and its run, as typed."""

from pathlib import Path

import pytest

from mtkit.cli.options import nonempty
from mtkit.cli.translation import recipe_of
from mtkit.errors import MtkitError
from mtkit.recipe.settings import with_method
from mtkit.runs import Run
from tests.cli.test_translate import lines_of, typed
from tests.decoding.trained import make_run


def test_a_recipe_of_decoding_settings_alone_leaves_the_data_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    make_run(tmp_path / "other", text=100)
    run = make_run(tmp_path).run
    monkeypatch.chdir(tmp_path / "other")  # whose mtkit-data is not the run's
    Path("fast.yaml").write_text("decoding: {beam: 2}\n")
    typed("--run", str(run.folder), "--recipe", "fast.yaml")
    assert (run.folder / "translations" / "test.source.txt").read_text() == (tmp_path / "test.source").read_text()


def test_greedy_search_drops_the_mbr_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("decoding: {method: sample, mbr: chrf, samples: 4}\n")
    for path in (None, tmp_path / "recipe.yaml"):
        chosen = recipe_of(Run(tmp_path), path, with_method({"method": "greedy"})).decoding
        assert (chosen.method, chosen.mbr, chosen.samples) == ("greedy", None, None)
        with pytest.raises(MtkitError, match="chooses among several hypotheses"):
            recipe_of(Run(tmp_path), path, with_method({"method": "greedy", "mbr": "chrf"}))


def test_several_translations_of_a_side_go_to_the_output_as_those_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    typed("--side", "test", "--n-best", "2", "--output", "out")
    assert Path("out").read_text().splitlines() == lines_of(typed("--input", "test.source", "--n-best", "2"))


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"beam": 4, "n_best": 2}, "beam"),
        ({"beam": 4, "method": "sample"}, None),
        ({"n_best": None}, "greedy"),
        ({"temperature": 0.5}, None),
    ],
)
def test_a_beam_size_selects_beam_search(options: dict[str, object], method: str | None, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("decoding: {method: greedy}\n")
    settings = with_method(nonempty(**options))
    if method is None:
        with pytest.raises(MtkitError, match="has no effect with --method"):
            recipe_of(Run(tmp_path), None, settings)
    else:
        assert recipe_of(Run(tmp_path), None, settings).decoding.method == method
        assert recipe_of(Run(tmp_path), tmp_path / "recipe.yaml", settings).decoding.method == method
