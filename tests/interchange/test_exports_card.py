"""The model card: its Python decodes as the run does, and it says where the model comes from."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding.translator import Translator
from mtkit.interchange import exports
from mtkit.interchange.exports import export_run
from mtkit.interchange.imports import import_marian
from mtkit.runs import Run
from tests.interchange.ours import make_run
from tests.interchange.text import SOURCES

MODEL = {"output_bias": True, "norm": "post"}


@pytest.fixture(autouse=True)
def few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export compares fewer lines, which is quicker."""
    monkeypatch.setattr(exports, "COMPARED", 4)


def text_of(run: Run, to: str, folder: Path) -> str:
    """The card of the run's export."""
    export_run(run, to, folder)
    return (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "decoding",
    [
        {"beam": 4, "length_penalty": 0.0},
        {"beam": 3, "length_penalty": 2.0},
        {"method": "greedy"},
        {"beam": 4, "n_best": 3},
        {"method": "greedy", "max_pieces": 9},
    ],
)
def test_ctranslate2_decodes_as_the_run_does(decoding: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    run = make_run(tmp_path / "a", model=MODEL, end=5.0, decoding=decoding)
    card = text_of(run, "ctranslate2", tmp_path / "out")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("FOLDER", str(tmp_path / "out")), names)
    translator = Translator([run], run.recipe.decoding, device="cpu", dtype="float32")
    pairs = [(line, best) for line, (best, *_) in zip(SOURCES, translator.translate(SOURCES), strict=True)]
    # in beam search, a hypothesis that reaches the limit ends there at no cost in CTranslate2
    pairs = [(line, best) for line, best in pairs if best.parts == 1 and not (best.cut and "beam" in decoding)]
    assert len({best.text for _, best in pairs}) > 4
    assert any(best.cut for _, best in pairs) == ("beam" not in decoding)
    for line, best in pairs:
        assert names["translate"](line).strip() == best.text.strip()


@pytest.mark.parametrize("to", ["huggingface", "ctranslate2"])
def test_other_searches_have_their_settings_in_the_export(to: str, tmp_path: Path) -> None:
    pytest.importorskip({"huggingface": "transformers", "ctranslate2": "ctranslate2"}[to])
    decoding = {"method": "sample", "temperature": 0.7, "top_k": 9, "top_p": 0.8, "no_repeat_ngram": 3}
    decoding |= {"mbr": "chrf", "samples": 4}
    card = text_of(make_run(tmp_path / "a", model=MODEL, decoding=decoding), to, tmp_path / "out")
    if to == "ctranslate2":
        for given in ("topk=9", "topp=0.8", "temperature=0.7", "ngram_size=3", "beam_size=1"):
            assert given in card
        assert "length_penalty" not in card.partition("## Settings")[0]
    else:
        search = (tmp_path / "out" / "generation_config.json").read_text(encoding="utf-8")
        for given in ('"do_sample": true', '"temperature": 0.7', '"top_k": 9', '"top_p": 0.8', '"max_length": 65'):
            assert given in search
        assert "max_length=min(2 * length + 20, 64) + 1" in card
    assert "decoding.top_k" in card
    assert "decoding.beam" not in card
    assert "model.cell" not in card


@pytest.mark.parametrize(
    ("to", "decoding", "lost"),
    [
        ("huggingface", {"coverage_penalty": 0.2}, "decoding.coverage_penalty = 0.2"),
        ("huggingface", {"coverage_penalty": 0.2, "mbr": "bleu"}, "coverage_penalty = 0.2 and decoding.mbr = bleu"),
        ("huggingface", {"method": "sample", "epsilon": 0.02}, ""),
        ("ctranslate2", {"coverage_penalty": 0.2}, ""),
        ("ctranslate2", {"no_repeat_ngram": 3}, "decoding.no_repeat_ngram = 3"),
        ("ctranslate2", {"method": "sample", "epsilon": 0.02}, "decoding.epsilon = 0.02"),
    ],
)
def test_settings_that_the_library_lacks_are_named(
    to: str, decoding: dict[str, Any], lost: str, tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2")
    exported = export_run(make_run(tmp_path / "a", model=MODEL, decoding=decoding), to, tmp_path / "out")
    assert ("computes otherwise" in exported.caution) == bool(lost)
    assert lost in exported.caution
    assert exported.caution[1:] in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_an_imported_model_was_not_trained_by_mtkit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.interchange.theirs import save_theirs

    save_theirs(tmp_path / "opus")
    one = import_marian(tmp_path / "opus", tmp_path / "one").run
    card = text_of(one, "huggingface", tmp_path / "out")
    assert "Trained with mtkit" not in card
    assert re.search(r"^Imported by mtkit \S+ from opus, which was trained elsewhere", card, re.MULTILINE)
    assert "- mtkit does not know the training data of opus\n" in card
    assert "| training." not in card
    assert str(tmp_path) not in card
    two = import_marian(tmp_path / "opus", tmp_path / "two", named="Some/opus").run
    card = text_of(two, "huggingface", tmp_path / "again")
    assert "base_model: Some/opus\n" in card
    assert "from Some/opus, which" in card


def test_a_tuned_model_names_its_origins(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = make_run(tmp_path / "a", model=MODEL)
    path = run.folder / "run.json"
    about = json.loads(path.read_text(encoding="utf-8"))
    origins = [
        {"run": "news", "imported_from": None, "data": ["news.en and news.ja"]},
        {"run": "opus", "imported_from": "Some/opus", "data": []},
    ]
    path.write_text(json.dumps(about | {"init_from": "news", "origins": origins}), encoding="utf-8")
    card = text_of(Run(run.folder), "huggingface", tmp_path / "out")
    began = "beginning with the weights of the run news, which began with the run opus (imported from Some/opus)"
    assert began in card
    assert "base_model: Some/opus\n" in card
    assert "- the run news before: news.en and news.ja\n" in card


def test_scores_of_other_decoding_settings_name_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = make_run(tmp_path / "a", model=MODEL)
    for options, side in (([], "valid"), (["--method", "greedy"], "valid, with method = greedy")):
        typed = ["translate", "--run", str(run.folder), "--side", "valid", "--device", "cpu", *options]
        assert CliRunner().invoke(app, typed, catch_exceptions=False).exit_code == 0
        card = text_of(run, "huggingface", tmp_path / side)
        assert f"| {side} " in card.partition("## Scores")[2]


def test_norwegian_is_not_false(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    card = text_of(make_run(tmp_path / "a", model=MODEL, directions=("en-no",)), "huggingface", tmp_path / "out")
    assert yaml.safe_load(card.split("---\n")[1])["language"] == ["en", "no"]
