"""`mtkit benchmark train`, as typed."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from mtkit import product_rate
from mtkit.cli.app import app
from mtkit.errors import MtkitError
from tests.training.conftest import TINY

SHORT = ["--updates", "2", "--warmup", "3", "--threads", "1"]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(product_rate, "LARGE", {"cpu": 32})
    Path("recipe.yaml").write_text(json.dumps(TINY))


def typed(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["benchmark", "train", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_table_json_and_picture_are_written(prepared_folder: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ["--recipe", "recipe.yaml", "--data", str(prepared_folder), "--attention", "full,linear", *SHORT]
    shown = typed(*given, "--precision", "float32", "--output", "there").stdout
    assert {each.name for each in Path("there").iterdir()} == {"train.txt", "train.json", "train.png"}
    assert Path("there/train.txt").read_text() in shown
    read = json.loads(Path("there/train.json").read_text())
    assert [(row["attention"], row["precision"]) for row in read["rows"]] == [
        ("full", "float32"),
        ("linear", "float32"),
    ]
    assert not Path("mtkit-runs").exists()


def test_auto_is_all_that_it_chooses_between(prepared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    given = ["--recipe", "recipe.yaml", "--data", str(prepared_folder), "--device", "cpu", *SHORT]
    typed(*given, "--precision", "bfloat16,auto", "--output", "there")
    read = json.loads(Path("there/train.json").read_text())
    assert [row["precision"] for row in read["rows"]] == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beside", "huggingfaec"], "did you mean 'huggingface'"),
        (["--beside", "ctranslate2"], "ctranslate2 does not train"),
        (["--attention", "linaer"], "did you mean 'linear'"),
        (["--data", "nowhere"], "mtkit prepare"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, prepared_folder: Path) -> None:
    with pytest.raises(MtkitError, match=message) as raised:
        typed("--data", str(prepared_folder), *arguments)
    assert "\n" not in str(raised.value)


def test_a_program_that_is_not_there_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.benchmark.peers.find_spec", lambda name: None)
    with pytest.raises(MtkitError, match="pip install transformers"):
        typed("--beside", "huggingface")
    with pytest.raises(MtkitError, match="pip install --no-deps joeynmt && pip install tensorboard"):
        typed("--beside", "joeynmt")  # with its requirements, other versions would replace mtkit's
