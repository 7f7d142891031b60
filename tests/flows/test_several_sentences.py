"""A model that was trained on single sentences, and lines that hold several."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.files import translate_side
from mtkit.decoding.held_out import HeldOut
from mtkit.decoding.lines.source import SourceLines, TrainedOn
from mtkit.decoding.translate import translate_lines
from mtkit.decoding.translation import Translation
from mtkit.decoding.translator import Translator
from mtkit.recipe import make_recipe
from mtkit.runs import Run
from mtkit.training.train import train

TOGETHER = 5
"""Sentences of a line."""

NOUNS = {"dog": "Hund", "cat": "Katze", "bird": "Vogel", "friend": "Freund", "child": "Kind"}
VERBS = {"sees": "sieht", "finds": "findet", "likes": "mag", "calls": "ruft"}
ENDS = ".!?"


def sentence(draw: random.Random) -> tuple[str, str]:
    """A sentence of three to five words, word by word in two languages."""
    nouns, verb, end = draw.choices(list(NOUNS), k=draw.choice([2, 3])), draw.choice(list(VERBS)), draw.choice(ENDS)
    english = " ".join([nouns[0], verb, *nouns[1:]])
    german = " ".join([NOUNS[nouns[0]], VERBS[verb], *(NOUNS[each] for each in nouns[1:])])
    return english.capitalize() + end, german.capitalize() + end


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained on single sentences until it knows their words."""
    folder, draw, given = tmp_path_factory.mktemp("several"), random.Random(1), {}
    for side, size in (("train", 1500), ("valid", 30)):
        pairs = [sentence(draw) for _ in range(size)]
        for name, lines in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
            (folder / f"{side}.{name}").write_text("".join(f"{line}\n" for line in lines))
        given[side] = {name: str(folder / f"{side}.{name}") for name in ("source", "target")}
    recipe = make_recipe(
        {
            "data": {
                "folder": folder / "data",
                **given,
                "tokenizer": {"vocabulary": 600},
                "cleaning": {"overlap": False},
            },
            "model": {
                "d_model": 32,
                "heads": 4,
                "feed_forward": 64,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "dropout": 0.0,
            },
            "training": {
                "max_updates": 200,
                "validate_every": 200,
                "batch_tokens": 256,
                "warmup_updates": 50,
                "peak_rate": 0.01,
                "precision": "float32",
            },
            "decoding": {"method": "greedy"},
        }
    )
    prepare(recipe.data)
    train(recipe, open_prepared(recipe.data.folder), folder / "run", command=["test"], device="cpu")
    return Run(folder / "run")


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    draw = random.Random(2)
    return [sentence(draw) for _ in range(12 * TOGETHER)]


@pytest.fixture(scope="module")
def lines(pairs: list[tuple[str, str]]) -> list[str]:
    """Each with several of the sentences."""
    return [" ".join(source for source, _ in pairs[place : place + TOGETHER]) for place in range(0, 60, TOGETHER)]


def sentences_in(text: str) -> int:
    return sum(text.count(end) for end in ENDS)


def right(found: list[list[Translation]], pairs: list[tuple[str, str]]) -> int:
    """How many sentences are translated as they should be, in their places."""
    translated = re.findall(rf"[^{ENDS} ][^{ENDS}]*[{ENDS}]", " ".join(best.text for best, *_ in found))
    return sum(one == target for one, (_, target) in zip(translated, pairs, strict=True))


def test_every_sentence_of_a_line_is_translated(run: Run, pairs: list[tuple[str, str]], lines: list[str]) -> None:
    found = Translator([run], run.recipe.decoding).translate(lines)
    assert [len(each) for each in found] == [1] * len(lines)
    assert [best.parts for best, *_ in found] == [TOGETHER] * len(lines)
    assert [sentences_in(best.text) for best, *_ in found] == [TOGETHER] * len(lines)
    assert right(found, pairs) > 0.7 * len(pairs)


def test_without_what_the_run_keeps_of_its_training_most_are_lost(run: Run, lines: list[str]) -> None:
    """Which is what the rule is for."""
    engine = ModelEngine(run.load_model(), run.recipe.decoding)
    found = translate_lines(engine, run.tokenizers, SourceLines(lines, trained_on=TrainedOn()))
    assert sum(sentences_in(best.text) for best, *_ in found) < 2 * len(lines)


def test_single_sentences_stay_whole(run: Run, pairs: list[tuple[str, str]]) -> None:
    lines = [source for source, _ in pairs]
    found = Translator([run], run.recipe.decoding).translate(lines)
    assert {best.parts for best, *_ in found} == {1}


def test_several_translations_of_a_line_are_made_of_those_of_its_parts(run: Run, lines: list[str]) -> None:
    settings = run.recipe.decoding.model_copy(update={"method": "beam", "beam": 3, "n_best": 3})
    found = Translator([run], settings).translate(lines)
    for line in found:
        assert len({each.text for each in line}) == 3
        assert [each.parts for each in line] == [TOGETHER] * 3
        assert [each.score for each in line] == sorted((each.score for each in line), reverse=True)


def test_test_sides_are_cut_as_lines_are(run: Run, lines: list[str], tmp_path: Path) -> None:
    translator = Translator([run], run.recipe.decoding)
    found, _, path = translate_side(translator, HeldOut("paragraphs", lines, lines), joined=False)
    assert found == translator.translate(lines)
    assert json.loads(path.with_suffix(".json").read_text())["in_parts"] == len(lines)


def test_the_command_says_how_many_lines_were_cut(run: Run, lines: list[str], tmp_path: Path) -> None:
    moved, source, output = tmp_path / "moved", tmp_path / "lines", tmp_path / "out"
    shutil.copytree(run.folder, moved)
    source.write_text("".join(f"{line}\n" for line in [*lines, "", "Dog sees cat."]))
    done = CliRunner().invoke(
        app, ["translate", "--run", str(moved), "--input", str(source), "--output", str(output)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "split at sentence ends and translated in parts" in done.stderr
    assert ": lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more" in done.stderr
    texts = output.read_text().split("\n")
    assert len(texts) == len(lines) + 3
    assert [sentences_in(text) for text in texts] == [TOGETHER] * 12 + [0, 1, 0]
