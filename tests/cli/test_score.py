"""`mtkit score`, as typed."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding.held_out import HeldOut, Speed, save
from mtkit.decoding.translate import Translation
from mtkit.errors import MtkitError
from mtkit.runs import FORMAT, Run

REFERENCES = ["the old dog sees a house", "two birds sing in the tree"]
OTHERS = ["an old dog sees a house", "two birds sing"]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, hypotheses in (("one", REFERENCES), ("two", OTHERS)):
        run = Run(Path("mtkit-runs") / name)
        translations = [[Translation(text, 0.0, 0.0, (3,))] for text in hypotheses]
        save(run, HeldOut("test", ["x", "y"], REFERENCES), translations, Speed(1, 2, 2), {})
        (run.folder / "run.json").write_text(json.dumps({"format": FORMAT}))
        (run.folder / "recipe.yaml").write_text("scoring: {lowercase: false}\n")
    Path("hypothesis").write_text("".join(f"{line}\n" for line in OTHERS))
    Path("reference").write_text("".join(f"{line}\n" for line in REFERENCES))


def typed(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["score", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def values(*arguments: str) -> dict[str, float]:
    return {score["name"]: score["value"] for score in json.loads(typed(*arguments, "--json").stdout)["scores"]}


def test_a_runs_translations_are_scored() -> None:
    assert values("--name", "one")["BLEU"] == pytest.approx(100)
    assert values("--run", "mtkit-runs/one")["TER"] == 0
    assert values("--name", "two") == values("--hypothesis", "hypothesis", "--reference", "reference")
    assert values() == values("--name", "two")  # the latest run


def test_several_references_count() -> None:
    pair = ["--hypothesis", "hypothesis", "--reference", "reference"]
    assert values(*pair, "--reference", "hypothesis")["BLEU"] == pytest.approx(100)
    assert values(*pair)["BLEU"] < 90


def test_the_recipe_says_how_unless_an_option_does() -> None:
    def signature(*arguments: str) -> str:
        return json.loads(typed(*arguments, "--json").stdout)["scores"][0]["signature"]

    Path("mtkit-runs/two/recipe.yaml").write_text("scoring: {lowercase: true, tokenize: char}\n")
    assert "case:lc" in signature("--name", "two")
    assert "tok:char" in signature("--name", "two")
    assert "case:mixed" in signature("--name", "two", "--cased")
    assert "tok:13a" in signature("--name", "two", "--tokenize", "13a")
    Path("recipe.yaml").write_text("scoring: {lowercase: true}\n")
    assert "case:lc" in signature("--hypothesis", "hypothesis", "--reference", "reference", "--recipe", "recipe.yaml")


def test_the_table_shows_all() -> None:
    shown = typed("--name", "two", "--tokenize", "char", "--lowercase").stdout
    assert "tok:char" in shown
    assert "case:lc" in shown
    assert "bs:1000|seed:12345" in shown
    assert all(name in shown for name in ("BLEU", "chrF", "TER", "95% interval", "test.reference.txt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hypothesis", "hypothesis"], "go together"),
        (["--reference", "reference"], "go together"),
        (["--hypothesis", "hypothesis", "--reference", "reference", "--name", "one"], "leave --run"),
        (["--hypothesis", "nowhere", "--reference", "reference"], "nowhere"),
        (["--hypothesis", "longer", "--reference", "reference"], "longer has 3 lines and reference has 2"),
        (["--name", "tow"], "did you mean 'two'"),
        (["--name", "three"], "mtkit translate"),
        (["--name", "one", "--tokenize", "13b"], "did you mean '13a'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    Path("longer").write_text("a\nb\nc")
    Path("mtkit-runs/three").mkdir()
    Path("mtkit-runs/three/run.json").write_text(json.dumps({"format": FORMAT}))
    Path("mtkit-runs/three/recipe.yaml").write_text("")
    with pytest.raises(MtkitError, match=message) as raised:
        typed(*arguments)
    assert "\n" not in str(raised.value)
