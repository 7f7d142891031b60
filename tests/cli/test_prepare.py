import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtkit.data.prepared import open_prepared


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mtkit", "prepare", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text("data: {builtin: {train: 60, valid: 5, test: 5}, tokenizer: {vocabulary: 400}}\n")
    return path


def test_the_built_in_corpus_is_prepared_once(tmp_path: Path, recipe: Path) -> None:
    first = run(tmp_path, "--recipe", "small.yaml", "--sentences", "3", "--seed", "5")
    assert first.returncode == 0, first.stderr
    assert "mtkit-data prepared in" in first.stdout
    assert "Next: mtkit train --recipe small.yaml" in first.stdout
    assert "bpe, normalisation nfkc" in first.stdout
    again = run(tmp_path, "--recipe", "small.yaml", "--sentences", "3", "--seed", "5")
    assert again.returncode == 0
    assert "up to date" in again.stdout
    prepared = open_prepared(tmp_path / "mtkit-data")
    assert prepared.settings.builtin.model_dump() == {"seed": 5, "train": 60, "valid": 5, "test": 5, "sentences": 3}


def test_own_text_and_options_arrive(tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("".join(f"the {number} dogs see a house\n" for number in range(50)))
    (tmp_path / "a.fr").write_text("".join(f"les {number} chiens voient une maison\n" for number in range(50)))
    pair = ("a.en", "a.fr")
    done = run(
        tmp_path, "--train", *pair, "--valid", *pair, "--test", *pair, "--target-language", "fr", "--separate",
        "--tokenizer", "unigram", "--vocabulary", "296", "--data", "own",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    prepared = open_prepared(tmp_path / "own")
    assert (prepared.settings.target_language, prepared.settings.tokenizer.kind) == ("fr", "unigram")
    assert not prepared.tokenizers.joint
    assert prepared.test is not None
    assert "--data own" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train", "none.en", "none.de", "--valid", "none.en", "none.de"), "no file none.en"),
        (("--train", "a", "b"), "data.train needs data.valid"),
        (("--train", "a", "b", "--valid", "a", "b", "--seed", "3"), "belong to the built-in corpus"),
        (("--tokenizer", "words"), "data.tokenizer.kind"),
        (("--vocabulary", "0"), "data.tokenizer.vocabulary"),
        (("--recipe", "none.yaml"), "none.yaml"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_help_has_examples(tmp_path: Path) -> None:
    shown = run(tmp_path, "--help").stdout
    assert "mtkit prepare --train train.en train.de --valid val.en val.de" in shown
