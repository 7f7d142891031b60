"""`mtkit compare`, as typed."""

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.cli.compare import compare
from mtkit.data.prepare import prepare
from mtkit.errors import DataError, MtkitError
from mtkit.experiments.folder import Folder
from mtkit.recipe.data import DataSettings
from tests.experiments.results import result

OPTIONS = {
    "attention", "recipe", "data", "out", "attention-option", "max-updates", "max-minutes", "batch-tokens", "seed",
    "device", "threads",
}  # fmt: skip
SCORES = {"full": 80.0, "longformer": 90.0, "em-routing": 70.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    given = {"folder": folder, "builtin": {"train": 200, "valid": 8, "test": 8}, "tokenizer": {"vocabulary": 400}}
    prepare(DataSettings.model_validate(given))
    return folder


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"d_model": 32, "heads": 2, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 1}
    training = {"batch_tokens": 200, "max_updates": 2, "validate_segments": 2, "log_every": 1}
    Path("r.yaml").write_text(yaml.safe_dump({"data": {"folder": str(data)}, "model": model, "training": training}))


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", "--recipe", "r.yaml", "--threads", "1", *arguments])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Results are known instead of computed; a mechanism without one fails, and "signal" is one to be stopped by."""
    chosen: dict[str, Any] = {"scores": SCORES, "signal": None}

    def record(folder: Folder, names: Sequence[str], *, show: Callable[[str], object], done: Any) -> int | None:
        for name in names:
            if name in chosen["scores"]:
                row = result(name, chosen["scores"][name])
                folder.keep(name, **{key: value for key, value in row.items() if key != "attention"})
            else:
                folder.fail(name, "diverged")
            done(name)
        number: int | None = chosen["signal"]
        return number

    monkeypatch.setattr("mtkit.experiments.compare.compare", record)
    return chosen


def test_for_real_it_leaves_table_picture_and_a_run_that_translates() -> None:
    pytest.importorskip("matplotlib")
    shown = typed("--attention", "grouped-query")
    assert shown.exit_code == 0, shown.output
    assert "[1/1] grouped-query (mtkit-compare/logs/grouped-query.log): training" in shown.stderr
    out = Path("mtkit-compare")
    assert all((out / f"compare.{end}").is_file() for end in ("md", "json", "png"))
    (row,) = json.loads((out / "compare.json").read_text())["results"]
    assert f"{row['bleu']['value']:.2f}" in shown.stdout
    translated = CliRunner().invoke(app, ["translate", "--run", "mtkit-compare/runs/grouped-query"])
    assert translated.exit_code == 0, translated.output


def test_rows_are_sorted_and_later_names_are_added(known: Any) -> None:
    typed("--attention", "full,em-routing", "--out", "there")
    shown = typed("--attention", "longformer", "--out", "there")
    assert shown.exit_code == 0
    rows = [line.split()[0] for line in shown.stdout.split("\n") if "1,234,567" in line]
    assert rows == ["longformer", "full", "em-routing"]
    lines = Path("there/compare.md").read_text().split("\n")
    assert [line.split()[1] for line in lines if "1,234,567" in line] == rows


def test_rows_have_their_options(known: Any) -> None:
    shown = typed("--attention", "full,longformer", "--attention-option", "window_radius=3")
    for text in (shown.stdout, Path("mtkit-compare/compare.md").read_text()):
        assert text.count("longformer window_radius=3 ") == 1
        assert "full window_radius" not in text
    rows = json.loads(Path("mtkit-compare/compare.json").read_text())["results"]
    assert [row["options"] for row in rows] == [{"window_radius": 3}, {}]


def test_a_failure_shows_in_the_exit_code_and_the_table(known: Any) -> None:
    shown = typed("--attention", "full,band")
    assert shown.exit_code == 1
    assert "band: failed: diverged; see mtkit-compare/logs/band.log" in shown.stdout
    assert shown.stdout.endswith("logs in mtkit-compare/logs\n")
    assert "80.00" in shown.stdout
    assert typed("--attention", "full").exit_code == 0  # another's failure is not this call's


def test_a_signal_shows_in_the_exit_code(known: Any) -> None:
    known["signal"] = signal.SIGTERM
    shown = typed("--attention", "full")
    assert shown.exit_code == 143
    assert "the same command resumes" in shown.stderr
    assert "80.00" in Path("mtkit-compare/compare.md").read_text()


def test_options_go_where_they_belong(known: Any) -> None:
    typed(
        "--attention", "full,longformer", "--attention-option", "window_radius=3", "--max-updates", "7",
        "--max-minutes", "0.5", "--batch-tokens", "300", "--seed", "5",
    )  # fmt: skip
    folder = Folder(Path("mtkit-compare"))
    recipe = folder.recipe("longformer")
    training = recipe.training
    assert (training.max_updates, training.max_minutes, training.batch_tokens, recipe.seed) == (7, 0.5, 300, 5)
    assert recipe.attention.options == {"window_radius": 3}
    assert folder.recipe("full").attention.options == {}
    assert folder.settings()["threads"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "full,bnad"], "did you mean 'band'"),
        (["--attention", "band", "--attention-option", "window_radis=3"], "did you mean 'window_radius'"),
        (["--attention", "band", "--attention-option", "window_radius"], "KEY=VALUE"),
        (["--attention", "full", "--max-updates", "0"], "training.max_updates"),
        (["--attention", ","], "--attention is empty"),
        (["--attention", "full", "--device", "gpu9"], "no device 'gpu9'"),
        (["--attention", "full", "--data", "nowhere"], "mtkit prepare"),
    ],
)
def test_mistakes_are_named_before_anything_trains(arguments: list[str], message: str) -> None:
    with pytest.raises(MtkitError, match=message) as raised:
        raise typed(*arguments).exception or AssertionError("nothing was refused")
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, DataError) == ("--data" in arguments)
    assert not Path("mtkit-compare").exists()


def test_another_recipe_is_refused(known: Any) -> None:
    typed("--attention", "full")
    with pytest.raises(MtkitError, match=r"training\.max_updates: 2 -> 9"):
        raise typed("--attention", "full", "--max-updates", "9").exception or AssertionError("nothing was refused")


def test_the_list_of_options_does_not_grow_by_accident() -> None:
    alone = typer.Typer(add_completion=False)
    alone.command()(compare)
    command = typer.main.get_command(alone)
    assert {name.removeprefix("--") for each in command.params for name in each.opts} == OPTIONS
