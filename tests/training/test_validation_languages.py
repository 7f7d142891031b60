"""The BLEU that chooses among checkpoints: of text as its language is written, and the one that `score` gives."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.decoding.held_out import Speed, held_out, save
from mtkit.decoding.lines.source import SourceLines
from mtkit.decoding.translation import Translation
from mtkit.evaluation.side_scores import score_side
from mtkit.evaluation.systems import run_sides
from mtkit.recipe import make_recipe
from mtkit.runs import Run
from mtkit.training import loop, validation
from mtkit.training.checkpoint import read_progress
from mtkit.training.train import train
from mtkit.training.validation import Validation
from tests.evaluation.unspaced import ENGLISH, RIGHT, WRONG
from tests.training.conftest import tiny

GERMAN = ["Der alte Hund.", "Ein Haus und ein Baum.", "Zwei Vögel singen im Garten.", "Wo ist der Bahnhof?"]
PERFECT = {**dict(zip(RIGHT["zh"], RIGHT["zh"], strict=True)), **dict(zip(GERMAN, GERMAN, strict=True))}
POOR = PERFECT | dict(zip(RIGHT["zh"], WRONG["zh"], strict=True))

Made = Callable[..., Prepared]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(*directions: str) -> Prepared:
        given: dict[str, Any] = {"train": [], "valid": []}
        for direction, (name, times) in product(directions, (("train", 10), ("valid", 1))):
            corpus = {"direction": direction}
            for side, lines in (("source", ENGLISH), ("target", GERMAN if direction.endswith("de") else RIGHT["zh"])):
                corpus[side] = str(tmp_path / f"{name}.{direction}.{side}")
                Path(corpus[side]).write_text("".join(f"{line}\n" for line in lines * times))
            given[name].append(corpus)
        folder, cleaning = tmp_path / "data", {"overlap": False}
        prepare(make_recipe({"data": {"folder": folder, "cleaning": cleaning, **given}}).data)
        return open_prepared(folder)

    return make


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """From now on validation's translations are made of its references by this mapping."""

    def by(mapping: dict[str, str]) -> None:
        def translate(model: object, tokenizers: object, lines: SourceLines, *args: object, **how: Any) -> Any:
            targets = [GERMAN if name.endswith("de") else RIGHT["zh"] for name in lines.directions.names_of_lines()]
            found = [mapping[target[ENGLISH.index(line)]] for line, target in zip(lines.lines, targets, strict=True)]
            return [[Translation(text, 0.0, 0.0, (3,))] for text in found]

        monkeypatch.setattr(validation, "translate_lines", translate)

    return by


def trained(prepared: Prepared, folder: Path, **groups: Any) -> list[str]:
    said: list[str] = []
    recipe = tiny(training={"max_updates": 2, "validate_every": 1, "validate_segments": None}, **groups)
    train(recipe, prepared, folder, command=[], device="cpu", say=said.append)
    return said


def test_a_perfect_translation_has_100_and_a_poor_one_less(
    made: Made, translated: Callable[[dict[str, str]], None], tmp_path: Path
) -> None:
    prepared = made("en-zh-cn")
    for mapping, least, most in ((PERFECT, 99.999, 100.001), (POOR, 10, 90)):
        translated(mapping)
        said = trained(prepared, tmp_path / f"run{least}")
        bleu = read_progress(Run(tmp_path / f"run{least}").checkpoint("last")).best_score
        assert bleu is not None
        assert least < bleu < most
        assert any("|tok:zh|" in line for line in said)
        assert not any("note" in line for line in said)


@pytest.mark.parametrize("directions", [("en-zh",), ("en-de", "en-zh")])
def test_validation_bleu_is_that_of_score(
    made: Made, translated: Callable[[dict[str, str]], None], tmp_path: Path, directions: tuple[str, ...]
) -> None:
    prepared = made(*directions)
    translated(POOR)
    trained(prepared, tmp_path / "run")
    run = Run(tmp_path / "run")
    side = held_out(prepared, "valid")
    texts = [[Translation(POOR[line], 0.0, 0.0, (3,))] for line in side.references]
    save(run, side, texts, Speed(1, 1, 1), {})
    found = score_side("valid", run_sides([run], ["valid"])["valid"], metrics=["BLEU"], language=run.target_language)
    (bleu,) = found.overall.scores[0]
    assert bleu.value == read_progress(run.checkpoint("last")).best_score
    assert ("|tok:13a+zh|" if len(directions) > 1 else "|tok:zh|") in bleu.signature


def test_a_tokenizer_that_does_not_fit_is_doubted_once(
    made: Made, translated: Callable[[dict[str, str]], None], tmp_path: Path
) -> None:
    prepared = made("en-xx")
    translated(PERFECT)
    (note,) = [line for line in trained(prepared, tmp_path / "run") if line.startswith("note")]
    assert "tokenizer 13a" in note
    assert "--tokenize" in note
    said = trained(prepared, tmp_path / "named", scoring={"tokenize": "zh"})
    assert not [line for line in said if line.startswith("note")]
    assert read_progress(Run(tmp_path / "named").checkpoint("last")).best_score == pytest.approx(100)


def test_a_tokenizer_that_is_not_installed_is_said(
    made: Made, translated: Callable[[dict[str, str]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "missing_tokenizer", lambda languages, tokenize: f"{languages} {tokenize}")
    translated(PERFECT)
    assert "note: ['zh'] None" in trained(made("en-zh"), tmp_path / "run")


def test_of_equal_bleu_the_lowest_loss_is_the_best_and_resets_patience(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, 4.0, 3.0, 3.5, 3.0, 3.2])
    made = Validation(0.0, 0.0, "tok:13a", None, [], 1.0, 1)
    monkeypatch.setattr(loop, "validate", lambda *_: replace(made, nll=next(losses)))
    recipe = tiny(training={"max_updates": 20, "validate_every": 1, "patience": 3})
    outcome = train(recipe, prepared, tmp_path / "run", command=[], device="cpu")
    assert outcome.progress.update == 6
    assert (outcome.progress.best_score, outcome.progress.best_nll) == (0.0, 3.0)
    assert Run(tmp_path / "run").checkpoint("best").name == "update-00000003"
