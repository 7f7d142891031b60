import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mtkit.cli.train import train
from mtkit.errors import DataError, MtkitError, RecipeError, RunError
from mtkit.recipe.data import DataSettings

OPTIONS = {
    "recipe", "data", "name", "preset", "model",
    "attention", "encoder-attention", "decoder-attention", "cross-attention",
    "attention-option", "init-from", "max-updates", "max-epochs", "max-tokens", "max-flops", "max-minutes",
    "batch-tokens", "accumulate",
    "peak-rate", "tokenize", "seed", "precision", "device", "threads", "reversible", "dry-run", "help",
}  # fmt: skip


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command line in an empty folder; library calls are recorded instead of training."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(train)
    seen: dict[str, Any] = {}

    class Done:
        signal: int | None = None

    def record(recipe: Any, prepared: Any, folder: Path, **options: Any) -> Done:
        seen.update(recipe=recipe, prepared=prepared, folder=folder, **options)
        return Done()

    def opened(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(folder=folder, settings=DataSettings(folder=folder))

    def run(*arguments: str, stopped_by: int | None = None) -> Any:
        monkeypatch.setattr(Done, "signal", stopped_by)
        with monkeypatch.context() as patch:
            patch.setattr("mtkit.training.train.train", record)
            patch.setattr("mtkit.data.prepared.open_prepared", opened)
            result = CliRunner().invoke(app, list(arguments))
        seen["output"] = result.output
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, seen

    return run


def test_bare_it_trains_the_default_recipe_under_the_attention_s_name(call: Any) -> None:
    code, seen = call()
    assert code == 0
    assert seen["folder"] == Path("mtkit-runs/full")
    assert seen["prepared"].folder == Path("mtkit-data")
    assert seen["device"] == "auto"
    assert seen["init_from"] is None


def test_options_go_where_they_belong(call: Any) -> None:
    _, seen = call(
        "--attention", "longformer", "--decoder-attention", "band, band,band", "--preset", "small", "--seed", "7",
        "--attention-option", "window_radius=64", "--attention-option", "decoder.window_radius=[1, 2]",
        "--max-updates", "9", "--max-epochs", "3", "--max-tokens", "7000", "--max-flops", "1e15",
        "--max-minutes", "0.5", "--batch-tokens", "512", "--accumulate", "2",
        "--peak-rate", "1e-3", "--precision", "float32", "--data", "elsewhere", "--reversible",
    )  # fmt: skip
    recipe = seen["recipe"]
    assert seen["folder"] == Path("mtkit-runs/longformer-band-full")
    assert seen["prepared"].folder == Path("elsewhere")
    assert recipe.seed == 7
    assert recipe.model.d_model == 256
    assert recipe.model.reversible
    assert recipe.attention.name == "longformer"
    assert recipe.attention.decoder == ["band", "band", "band"]
    assert recipe.attention.options == {"window_radius": 64, "decoder.window_radius": [1, 2]}
    training = recipe.training
    assert (training.max_updates, training.max_epochs, training.max_minutes) == (9, 3, 0.5)
    assert (training.max_tokens, training.max_flops) == (7_000, 1e15)
    assert (training.batch_tokens, training.accumulate, training.peak_rate) == (512, 2, 1e-3)
    assert training.precision == "float32"


def test_options_win_over_the_recipe_file(call: Any, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("attention: {name: band}\ntraining: {accumulate: 5, batch_tokens: 100}\n")
    _, seen = call("--recipe", "r.yaml", "--accumulate", "2")
    assert seen["recipe"].training.accumulate == 2
    assert seen["recipe"].training.batch_tokens == 100
    assert seen["folder"] == Path("mtkit-runs/band")


def test_an_attention_given_fills_the_roles_that_the_recipe_filled(call: Any, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("attention: {encoder: band, decoder: average, cross: full}\n")
    attention = call("--recipe", "r.yaml", "--attention", "longformer")[1]["recipe"].attention
    assert (attention.name, attention.encoder, attention.decoder, attention.cross) == ("longformer", None, None, None)
    attention = call("--recipe", "r.yaml", "--attention", "longformer", "--decoder-attention", "full")[1][
        "recipe"
    ].attention
    assert (attention.encoder, attention.decoder) == (None, "full")
    attention = call("--recipe", "r.yaml", "--encoder-attention", "linear")[1]["recipe"].attention
    assert (attention.name, attention.encoder, attention.decoder) == (None, "linear", "average")


def test_a_note_lists_the_settings_of_a_preset_that_the_recipe_overrides(call: Any, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("preset: tiny\nmodel: {d_model: 64, heads: 4}\ntraining: {clip_norm: 2.0}\n")
    _, seen = call("--recipe", "r.yaml", "--preset", "small")
    assert seen["output"] == "note: the recipe r.yaml overrides settings of --preset small: model.d_model: 256 -> 64\n"
    assert seen["recipe"].model.d_model == 64
    assert not call("--preset", "small")[1]["output"]
    (tmp_path / "r.yaml").write_text("model: {d_model: 64, heads: 4}\ntraining:\n  # nothing\n")
    _, seen = call("--recipe", "r.yaml", "--preset", "small", "--max-updates", "5")
    assert "model.d_model: 256 -> 64" in seen["output"]


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_a_signal_shows_in_the_exit_code(call: Any, number: int, code: int) -> None:
    assert call(stopped_by=number)[0] == code


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--preset", "smal"], RecipeError, "did you mean 'small'"),
        (["--max-updates", "0"], RecipeError, "training.max_updates"),
        (["--precision", "int3"], RecipeError, "training.precision"),
        (["--attention-option", "radius"], MtkitError, "KEY=VALUE"),
        (["--attention-option", "radius=[1"], MtkitError, "not a YAML value"),
        (["--recipe", "none.yaml"], RecipeError, "cannot read recipe none.yaml"),
        (["--init-from", "nobody"], RunError, "no run"),
        *((["--name", name], MtkitError, f"--name '{name}'") for name in ("", ".", "..", "../elsewhere")),
    ],
)
def test_mistakes_are_one_line(call: Any, arguments: list[str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)) as error:
        call(*arguments)
    assert "\n" not in str(error.value)


def test_without_prepared_data_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(train)
    error = CliRunner().invoke(app, []).exception
    assert isinstance(error, DataError)
    assert "mtkit prepare" in str(error)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_is_of_a_folder_that_is_removed(call: Any) -> None:
    code, seen = call("--dry-run", "--name", "one")
    assert (code, seen["preview"]) == (0, True)
    assert seen["folder"].name == "one"
    assert not seen["folder"].parent.exists()
    assert "nothing was written" in seen["output"]
    assert call()[1]["preview"] is False


def test_the_list_of_options_does_not_grow_by_accident() -> None:
    app = typer.Typer()
    app.command()(train)
    command = typer.main.get_command(app)
    found = {name.removeprefix("--") for each in command.params for name in each.opts}
    assert found | {"help"} == OPTIONS | (found & {"install-completion", "show-completion"})


def test_a_recipe_whose_data_has_changed_since_is_said_to_be_prepared_otherwise(call: Any) -> None:
    Path("mine.yaml").write_text("data: {tokenizer: {vocabulary: 4000}}")
    _, seen = call("--recipe", "mine.yaml")
    assert (
        "note: mtkit-data was prepared with other settings than mine.yaml has (tokenizer.vocabulary: " in seen["output"]
    )
    assert "mtkit prepare --recipe mine.yaml --overwrite" in seen["output"]
    Path("mine.yaml").write_text("data: {train: {source: a, target: b}, valid: {source: a, target: b}}")
    _, seen = call("--recipe", "mine.yaml")
    assert "note: mtkit-data was prepared with other settings" in seen["output"]
    _, seen = call("--recipe", "mine.yaml", "--data", "other")  # meant so
    assert "note" not in seen["output"]
    Path("mine.yaml").write_text("seed: 2")
    _, seen = call("--recipe", "mine.yaml")
    assert "note" not in seen["output"]
