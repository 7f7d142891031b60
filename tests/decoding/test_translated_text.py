"""Training text that a run translates: into the target (distillation), or into the source (back-translation)."""

from pathlib import Path
from typing import Any

import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.decoding import translated_text
from mtkit.decoding.files import translate_file
from mtkit.decoding.translated_text import with_translations
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, MtkitError, RecipeError, RunError
from mtkit.recipe import make_recipe
from mtkit.recipe.data import DataSettings
from tests.decoding.trained import Trained, make_run, sentences


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("teacher"), directions=("en-de", "de-en"))


@pytest.fixture(autouse=True)
def _inside(teacher: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mtkit-runs").symlink_to(teacher.run.folder.parent)
    for name, seed in (("train", 1), ("more", 2), ("valid", 3)):
        for side in ("en", "de"):
            Path(f"{name}.{side}").write_text("".join(f"{line}\n" for line in sentences(40, seed)))


def settings(*more: dict[str, Any], **given: Any) -> DataSettings:
    train = [{"source": "train.en", "target": "train.de"}, *more]
    valid = {"source": "valid.en", "target": "valid.de"}
    return make_recipe({"data": {"train": train, "valid": valid, "tokenizer": {"vocabulary": 400}, **given}}).data


@pytest.mark.parametrize(
    ("given", "missing", "direction"), [("source", "target", "en-de"), ("target", "source", "de-en")]
)
def test_the_side_that_is_missing_is_the_run_s_translation(
    teacher: Trained, given: str, missing: str, direction: str
) -> None:
    wanted = settings({given: "more.en", "translated_by": "one"})
    found = with_translations(wanted)
    made = Path("mtkit-data-translated/train-2.txt")
    assert found.train[0] == wanted.train[0]
    assert (getattr(found.train[1], given), getattr(found.train[1], missing)) == ("more.en", made)
    assert found.train[1].translated_by is None
    translate_file(Translator([teacher.run]), Path("more.en"), Path("expected"), direction=direction)
    assert made.read_text() == Path("expected").read_text()
    record = prepare(found).record["sides"]["train"]
    assert [each["lines"] for each in record["corpora"]] == [40, 40]
    trained = open_prepared(found.folder).settings.train[1]
    assert getattr(trained, missing) == str(made)


def test_what_is_there_is_used_again_until_the_text_or_the_run_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any, **rest: Any) -> Any:
        calls.append(rest["direction"])
        return translate_file(*arguments, **rest)

    monkeypatch.setattr(translated_text, "translate_file", counted)
    wanted = settings({"source": "more.en", "translated_by": "mtkit-runs/one"})
    said: list[str] = []
    assert with_translations(wanted, say=said.append) == with_translations(wanted, say=said.append)
    assert len(calls) == 1
    assert len([each for each in said if "translating" in each]) == 1
    assert "translating 40 lines of more.en with mtkit-runs/one, beam 3" in said[1]
    Path("more.en").write_text("The tree.\n" * 40)
    with_translations(wanted)
    assert len(calls) == 2
    record = Path("mtkit-data-translated/train-2.json")
    record.write_text(record.read_text().replace('"weights"', '"others"'))
    with_translations(wanted)
    assert len(calls) == 3
    Path("mtkit-data-translated/train-2.txt").unlink()
    with_translations(wanted)
    assert len(calls) == 4


def test_a_file_of_the_user_is_not_replaced() -> None:
    theirs = Path("mtkit-data-translated/train-2.txt")
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("years of work\n")
    theirs.with_suffix(".json").unlink(missing_ok=True)
    with pytest.raises(MtkitError, match="exists, and mtkit has no record that it wrote it; move it away"):
        with_translations(settings({"source": "more.en", "translated_by": "mtkit-runs/one"}))
    assert theirs.read_text() == "years of work\n"


def test_progress_is_that_of_the_lines() -> None:
    seen: list[Any] = []

    def bar(items: Any, what: str, total: int | None) -> Any:
        seen.append((what, total))
        for item in items:
            seen.append(item)
            yield item

    with_translations(settings({"source": "more.en", "translated_by": "one"}), progress=bar)
    assert seen == [("translating more.en", 40), *range(40)]


def test_documents_are_those_of_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "documents", name="joined", documents=30)
    run = tmp_path / "documents" / "mtkit-runs" / "joined"
    asked = []

    def kept(*arguments: Any, **rest: Any) -> Any:
        asked.append((rest["documents"], rest["document_ids"]))
        return translate_file(*arguments, **rest)

    monkeypatch.setattr(translated_text, "translate_file", kept)
    for ids in ("".join(f"{number // 4}\n" for number in range(40)), "1\n" * 40):
        Path("ids").write_text(ids)
        with_translations(settings({"source": "more.en", "documents": "ids", "translated_by": str(run)}))
    with_translations(settings({"source": "more.en", "documents": "empty-lines", "translated_by": str(run)}))
    with_translations(settings({"source": "more.en", "translated_by": str(run)}))
    assert asked == [(None, Path("ids")), (None, Path("ids")), (None, None), (False, None)]  # each time anew
    with_translations(settings({"source": "more.en", "documents": "ids", "translated_by": "one"}))
    assert asked[4:] == [(None, None)]  # that run translates sentences


def test_mistakes_are_named(tmp_path: Path) -> None:
    by = {"translated_by": "one"}
    with pytest.raises(RunError, match="did you mean 'one'"):
        with_translations(settings({"source": "more.en", "translated_by": "onne"}))
    with pytest.raises(RunError, match="no such run folder; train that run first"):
        with_translations(settings({"source": "more.en", "translated_by": "mtkit-runs/two"}))
    with pytest.raises(RecipeError, match=r"translates en-de, de-en, but the corpus needs en-fr"):
        with_translations(settings({"source": "more.en", **by}, target_language="fr"))
    with pytest.raises(DataError, match=r"missing\.en"):
        with_translations(settings({"source": "missing.en", **by}))
    with pytest.raises(DataError, match=r"more\.en is not translated by one yet"):
        prepare(settings({"source": "more.en", **by}))
    for corpus, message in (
        ({"source": "more.en", "target": "more.de", **by}, "either source or target"),
        (by, "either source or target"),
        ({"file": "more.tsv", "source": "1", **by}, "applies to text files"),
    ):
        with pytest.raises(RecipeError, match=message):
            settings(corpus)
    with pytest.raises(RecipeError, match="the valid side has translated_by"):
        settings(valid={"source": "valid.en", **by})
