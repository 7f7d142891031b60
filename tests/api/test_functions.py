"""mtkit from Python: the page's examples run, and what the functions give is what the rooms below them give."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mtkit
from mtkit.decoding.alignment import align
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError, RunError
from mtkit.evaluation.scores import score_corpus
from mtkit.runs import Run
from tests.decoding.trained import make_run

PAGE = Path(__file__).parents[2] / "docs/python.md"
LINES = ["The old dog sees a bird.", "", "A green house. \u2028 The tree.", "猫は木の下に。"]


def test_the_pages_examples_give_what_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join(re.findall(r"```pycon\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(text, {}, "python.md", str(PAGE), 0)
    assert len(examples.examples) > 10
    shown: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=shown.append)
    assert not shown, "".join(shown)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs")).run.folder


def test_translations_are_the_translators(folder: Path) -> None:
    loaded = mtkit.load(folder)
    found = loaded.translate(LINES, beam=4, n_best=2, length_penalty=0.5)
    settings = loaded.translator.settings.model_copy(update={"beam": 4, "n_best": 2, "length_penalty": 0.5})
    own = Translator(loaded.translator.runs, settings).lines(LINES)
    assert [[each.text, *(other.text for other in each.alternatives)] for each in found] == [
        [each.text for each in line] for line in own
    ]
    assert [each.score for each in found] == [line[0].score for line in own]
    assert [each.source for each in found] == LINES
    assert (found[1].text, found[1].parts, found[1].pieces) == ("", 0, [])
    assert loaded.translator.settings.beam == 3  # settings of one call stay with it
    for idle, method in (({"temperature": 0.5}, "sample"), ({"beam": 4, "method": "greedy"}, "beam")):
        with pytest.raises(MtkitError, match=f'has no effect with method=.*add method="{method}"'):
            loaded.translate(LINES, **idle)
    assert len(loaded.translate(LINES, method="greedy", coverage_penalty=0)) == len(LINES)


def test_an_alignment_is_that_of_the_text(folder: Path) -> None:
    loaded = mtkit.load(folder)
    first, blank = loaded.translate(["a dog", ""], max_pieces=5)
    wanted = align(loaded.translator.network, loaded.translator.tokenizers, "a dog", first.text)
    assert first.alignment.target == wanted.target
    torch.testing.assert_close(first.alignment.weights, wanted.weights)
    with pytest.raises(MtkitError, match="blank"):
        _ = blank.alignment


def test_a_run_with_several_directions(tmp_path: Path) -> None:
    loaded = mtkit.load(make_run(tmp_path, directions=("en-de", "en-fr")).run.folder)
    assert loaded.directions == ["en-de", "en-fr"]
    assert len(loaded.translate(["a dog"], direction="en-fr", max_pieces=5)) == 1
    with pytest.raises(MtkitError, match="several directions"):
        loaded.translate(["a dog"])


def test_scores_are_those_of_the_corpus(tmp_path: Path) -> None:
    path = tmp_path / "reference"
    path.write_text("我喜欢猫。\n他走了。\n")
    hypotheses, references = ["我喜欢狗。", "他走了。"], ["我喜欢猫。", "他走了。"]
    wanted = score_corpus(hypotheses, [references], languages=["zh", "zh"])
    assert mtkit.score(hypotheses, path, language="zh") == wanted
    assert wanted[0].value > mtkit.score(hypotheses, references, metrics=["BLEU"], bootstrap=0)[0].value


def test_mistakes_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="no run"):
        mtkit.load("mine")
    with pytest.raises(RunError, match="no run folder"):
        mtkit.load(tmp_path / "mine")
    with pytest.raises(MtkitError, match="one string"):
        mtkit.load(folder).translate("a dog")
    with pytest.raises(MtkitError, match="one string"):
        mtkit.score("a dog", ["a dog"])
    with pytest.raises(RunError, match="without slashes"):
        mtkit.train(name="../mine")
    with pytest.raises(AttributeError, match="translat"):
        _ = mtkit.translat  # type: ignore[attr-defined]


def test_importing_mtkit_loads_nothing_heavy() -> None:
    script = (
        "import sys, mtkit; assert 'load' in dir(mtkit); assert not {'torch', 'numpy', 'pydantic'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_training_begins_with_the_model_of_a_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = {"max_updates": 1, "validate_segments": 1, "precision": "float32"}
    recipe = {"data": {"folder": folder.parents[1] / "mtkit-data"}, "training": few}
    outcome = mtkit.train(recipe, name="tuned", init_from=folder, device="cpu")
    assert Run(outcome.folder).recipe.model == Run(folder).recipe.model
    assert Run(outcome.folder).about["init_from"] == folder.name
