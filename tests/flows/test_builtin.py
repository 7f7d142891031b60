"""The four commands, one after the other as people type them, on the built-in corpus."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = ["--attention", "longformer", "--batch-tokens", "1024", "--max-updates", "300", "--peak-rate", "8e-3"]
"""A sixth of the bare command's work at a higher rate: enough to show that the model learns."""


def mtkit(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "mtkit", *arguments]
    # one thread: two that wait for each other are slow beside the other tests
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which the four commands have run once."""
    folder = tmp_path_factory.mktemp("flow")
    mtkit(folder, "prepare")
    mtkit(folder, "train", *TRAINING)
    mtkit(folder, "translate")
    return folder


def scores(folder: Path) -> dict[str, float]:
    return {each["name"]: each["value"] for each in json.loads(mtkit(folder, "score", "--json"))["scores"]}


def test_the_model_has_learned(folder: Path) -> None:
    assert scores(folder)["BLEU"] > 40  # a word-by-word dictionary stays under it


def test_validation_bleu_is_what_translate_and_score_give(folder: Path) -> None:
    run = folder / "mtkit-runs" / "longformer"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validation = [row for row in rows if row["kind"] == "validation"][-1]  # of the best checkpoint
    assert json.loads((run / "best.json").read_text())["checkpoint"].endswith(str(validation["update"]))
    text = folder / "mtkit-data" / "text"
    output = folder / "valid.out"
    mtkit(folder, "translate", "--input", str(text / "valid.en"), "--output", str(output))
    shown = mtkit(folder, "score", "--hypothesis", str(output), "--reference", str(text / "valid.de"), "--json")
    bleu = next(each for each in json.loads(shown)["scores"] if each["name"] == "BLEU")
    assert bleu["value"] == validation["bleu"]


def test_everything_typed_again_picks_up_where_it_was(folder: Path) -> None:
    before = scores(folder)
    assert "up to date" in mtkit(folder, "prepare")
    assert "finished already" in mtkit(folder, "train", *TRAINING)
    mtkit(folder, "translate")
    assert scores(folder) == before


def test_awkward_lines_come_back_one_for_one(folder: Path) -> None:
    awkward = [
        "",
        "   ",
        "Anna sleeps.",
        "a\u2028b\x85c\x0bd\x0ce",
        "\x00\x01\x7f",
        "word " * 1500,
        "🙂" * 50,
        "\ufeffx",
    ]
    source, output = folder / "awkward.en", folder / "awkward.de"
    source.write_bytes("\n".join(awkward).encode())  # and no newline at the end
    mtkit(folder, "translate", "--input", str(source), "--output", str(output), "--method", "greedy")
    lines = output.read_bytes().decode().split("\n")
    assert len(lines) == len(awkward) + 1
    assert lines[-1] == lines[0] == lines[1] == ""
    assert all(lines[2:3])


def test_a_moved_run_still_translates(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    (folder / "mtkit-runs" / "longformer").rename(moved)
    try:
        shown = mtkit(folder, "score", "--run", str(moved), "--json")
        assert json.loads(shown)["scores"]
        (tmp_path / "one.en").write_text("Anna sleeps.\n")
        assert mtkit(tmp_path, "translate", "--run", str(moved), "--input", "one.en").count("\n") == 1
    finally:
        moved.rename(folder / "mtkit-runs" / "longformer")
