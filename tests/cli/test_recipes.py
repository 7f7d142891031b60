"""`mtkit recipes`, as typed."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.errors import MtkitError, RecipeError
from mtkit.recipe import file as recipe_file
from mtkit.recipe import load_recipe

RECIPE = """# A few sentences
promises: [BLEU >= {bound} on test]
preset: tiny
data:
  builtin: {{train: 200, valid: 8, test: 8}}
  tokenizer: {{vocabulary: 400}}
model: {{d_model: 16, heads: 2, feed_forward: 16, encoder_layers: 1, decoder_layers: 1}}
training: {{max_updates: 3, batch_tokens: 200, validate_every: 3, validate_segments: 1}}
decoding: {{method: greedy}}
"""


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["recipes", *arguments])


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three recipes that come with mtkit instead of the real ones."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "easy.yaml").write_text(RECIPE.format(bound=0))
    (folder / "hard.yaml").write_text(RECIPE.format(bound=100.5))
    (folder / "open.yaml").write_text(RECIPE.format(bound=0).replace("promises", "# hopes for"))
    monkeypatch.setattr(recipe_file, "FOLDER", folder)
    return folder


def test_the_list_has_a_line_for_each_recipe() -> None:
    shown = typed()
    assert shown.exit_code == 0
    names = [line.split("  ")[0] for line in shown.stdout.split("\n")[1:] if line and not line.startswith(" ")]
    assert names == list(recipe_file.shipped())
    assert max(map(len, shown.stdout.split("\n"))) < 150  # a terminal that is narrower wraps them


def test_what_is_shown_is_a_recipe(tmp_path: Path) -> None:
    shown = typed("show", "builtin-longformer")
    (tmp_path / "mine.yaml").write_text(shown.stdout)
    assert load_recipe(tmp_path / "mine.yaml") == load_recipe(Path("builtin-longformer"))
    assert yaml.safe_load(shown.stdout)["attention"] == {"name": "longformer"}


def test_the_schema_takes_the_shipped_and_refuses_what_recipes_refuse() -> None:
    schema = json.loads(typed("schema").stdout)
    assert schema["properties"]["seed"]["description"]
    check = Draft202012Validator(schema)
    for path in recipe_file.shipped().values():
        check.validate(yaml.safe_load(path.read_text()))
    for wrong in ({"sead": 1}, {"training": {"max_updates": 0}}, {"preset": "huge"}):
        assert not check.is_valid(wrong)


def test_an_unknown_name_is_named() -> None:
    for command in ("show", "check"):
        with pytest.raises(RecipeError, match="did you mean 'scan-simple'"):
            raise typed(command, "scan-simpel").exception or AssertionError("nothing was refused")


def test_a_recipe_of_ones_own_is_checked_and_shown_by_its_path(shipped: Path) -> None:
    Path("easy").mkdir()  # a folder is no recipe: the name still means the one that comes with mtkit
    assert typed("show", "easy").stdout == RECIPE.format(bound=0)
    Path("mine.yaml").write_text(RECIPE.format(bound=100.5))
    assert typed("show", "mine.yaml").stdout == RECIPE.format(bound=100.5)
    shown = typed("check", "mine.yaml", "--threads", "1", "--max-updates", "2")
    assert "\nnot kept: BLEU >= 100.5 on test" in shown.stdout
    assert (Path("mtkit-recipes") / "mine-updates-2" / "check.json").exists()
    with pytest.raises(RecipeError, match=r"cannot read recipe none\.yaml"):
        raise typed("check", "none.yaml").exception or AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("easy", 0, "\nkept: BLEU >= 0 on test; reached "),
        ("hard", 1, "\nnot kept: BLEU >= 100.5 on test; reached "),
        ("open", 0, "open promises nothing yet"),
    ],
)
def test_check_says_whether_the_promise_was_kept(shipped: Path, name: str, code: int, words: str) -> None:
    shown = typed("check", name, "--threads", "1", "--max-updates", "2")
    assert shown.exit_code == code, shown.output
    assert words in shown.stdout
    assert "95% interval" in shown.stdout
    run = Path("mtkit-recipes") / f"{name}-updates-2" / "run"
    assert (run / "checkpoints" / "update-00000002").is_dir()
    translated = CliRunner().invoke(app, ["translate", "--run", str(run)])
    assert translated.exit_code == 0, translated.output


def test_check_goes_where_it_is_told(shipped: Path) -> None:
    assert typed("check", "easy", "--threads", "1", "--max-updates", "1", "--output", "there").exit_code == 0
    assert Path("there/check.json").is_file()
    assert not Path("mtkit-recipes").exists()


@pytest.mark.parametrize(("there", "here"), [("vocabulary: 400", "vocabulary: 390"), ("heads: 2", "heads: 4")])
def test_after_a_change_of_the_recipe_check_says_what_check_takes(shipped: Path, there: str, here: str) -> None:
    command = ("check", "easy", "--threads", "1", "--max-updates", "1")
    assert typed(*command).exit_code == 0
    recipe = shipped / "easy.yaml"
    recipe.write_text(recipe.read_text().replace(there, here))
    with pytest.raises(
        MtkitError, match="delete mtkit-recipes/easy-updates-1 to start again, or give another --output"
    ) as caught:
        raise typed(*command).exception or AssertionError("nothing was refused")
    assert "--overwrite" not in str(caught.value)
    assert "--name" not in str(caught.value)
