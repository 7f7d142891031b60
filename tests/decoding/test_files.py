"""Whole files from Python: translated, scored, and gone on with after a kill."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mtkit.decoding import files
from mtkit.decoding import translator as module
from mtkit.decoding.contexts import contexts_in_documents
from mtkit.decoding.files import force_file, translate_file
from mtkit.decoding.lines import chunks
from mtkit.decoding.lines.source import SourceLines
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, MtkitError
from mtkit.recipe import DecodingSettings
from tests.decoding.trained import Trained, make_run, sentences

GREEDY = DecodingSettings(method="greedy")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run"), documents=20)


@pytest.fixture(scope="module")
def translator(trained: Trained) -> Translator:
    return Translator([trained.run], GREEDY)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("".join(f"{line}\n" for line in [*sentences(6, 1), "The tree and the house. " * 9, ""]))
    return path


def written(translate: Callable[[io.BytesIO], object]) -> list[str]:
    stream = io.BytesIO()
    translate(stream)
    return stream.getvalue().decode().splitlines()


def test_a_killed_call_goes_on_where_it_was(
    translator: Translator, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = translate_file(translator, source, tmp_path / "whole", documents=False)
    assert whole.in_parts.first == (7,)
    monkeypatch.setattr(chunks, "CHUNK", 3)
    translate, firsts, said = module.translate_lines, list[int](), list[str]()

    def dying(engine: object, tokenizers: object, lines: SourceLines, **rest: object) -> object:
        assert lines.numbers
        firsts.append(lines.numbers[0])
        if firsts == [0, 3, 6]:
            raise KeyboardInterrupt
        return translate(engine, tokenizers, lines, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "translate_lines", dying)
    with pytest.raises(KeyboardInterrupt):
        translate_file(translator, source, tmp_path / "out", documents=False)
    assert not (tmp_path / "out").exists()
    done: list[int] = []
    notes = translate_file(
        translator, source, tmp_path / "out", documents=False, say=said.append, on_progress=done.append
    )
    assert firsts == [0, 3, 6, 6]
    assert said == [f"resuming after line 6, where {tmp_path / 'out.partial'} ends"]
    assert sum(done) == 8
    assert notes == whole
    assert (tmp_path / "out").read_text() == (tmp_path / "whole").read_text()


def test_lines_in_lines_out_with_scores_and_several_of_each(trained: Trained, source: Path) -> None:
    plain = Translator([trained.run], DecodingSettings(beam=3, n_best=3))
    several = [line.split("\t") for line in written(lambda out: translate_file(plain, source, out))]
    assert [number for number, *_ in several] == [str(line) for line in range(1, 9) for _ in range(3)]
    best = Translator([trained.run], DecodingSettings(beam=3))
    scored = written(lambda out: translate_file(best, source, out, scores=True))
    assert [line.split("\t") for line in scored] == [[score, text] for _, score, text in several[::3]]


def test_one_string_is_neither_a_file_nor_lines(translator: Translator, tmp_path: Path) -> None:
    for text, output in (("text", tmp_path / "out"), (["a"], "out")):
        with pytest.raises(MtkitError, match="is one string; give a Path for a file, or a list of lines"):
            translate_file(translator, text, output)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_documents_have_ids_or_blank_lines(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, seen = [*sentences(3, 2), "", *sentences(2, 3)], list[object]()
    source = translator.source
    monkeypatch.setattr(
        translator, "source", lambda *given, documents, **how: seen.append(documents) or source(*given, **how)
    )
    for how in ({}, {"document_ids": list("aabbbc")}, {"documents": False}, {"scores": True}):
        assert len(written(lambda out: translate_file(translator, lines, out, **how))) == 6  # noqa: B023
    assert seen == [[0, 0, 0, 1, 1, 1], list("aabbbc"), None, None]
    with pytest.raises(DataError, match="the ids must have as many lines"):
        translate_file(translator, lines, io.BytesIO(), document_ids=["a"])
    with pytest.raises(MtkitError, match="one by one"):
        translate_file(translator, lines, io.BytesIO(), documents=True, scores=True)


def test_ids_of_documents_need_a_run_trained_on_documents(tmp_path: Path) -> None:
    translator, ids = Translator([make_run(tmp_path).run], GREEDY), ["a", "a"]
    lines, message = sentences(2, 2), "--document-ids needs a run trained on documents"
    with pytest.raises(MtkitError, match=message):
        translate_file(translator, lines, tmp_path / "out", document_ids=ids)
    with pytest.raises(MtkitError, match=message):
        force_file(translator, lines, lines, tmp_path / "out", document_ids=ids)
    assert not (tmp_path / "out").exists()
    translate_file(translator, lines, tmp_path / "out", documents=False, document_ids=ids)


def test_given_translations_are_scored(translator: Translator, tmp_path: Path) -> None:
    lines, given = sentences(4, 5), sentences(4, 6)
    expected = [f"{each.log_prob:.6f}" for each in translator.force_pieces(lines, given)]
    assert written(lambda out: force_file(translator, lines, given, out, documents=False)) == expected
    force_file(translator, lines, given, tmp_path / "out", directions="en-de", documents=False)
    assert (tmp_path / "out").read_text().split("\n") == [*expected, ""]
    with pytest.raises(DataError, match=r"the targets must have as many lines as the sources.* \(4 and 1 lines\)"):
        force_file(translator, lines, ["a"], io.BytesIO())


def test_given_translations_follow_their_documents(translator: Translator, tmp_path: Path) -> None:
    lines, given = [*sentences(4, 5), "", *sentences(2, 7)], [*sentences(4, 6), "", *sentences(2, 8)]
    contexts = contexts_in_documents(lines, given, [0, 0, 0, 0, 1, 1, 1], 20)
    forced = translator.force_pieces(lines, given, contexts, translator.context_limits())
    expected, said = [f"{line.log_prob:.6f}" for line in forced], list[str]()
    assert written(lambda out: force_file(translator, lines, given, out, say=said.append)) == expected
    cut = sum(line.cut for line in forced)
    assert 0 < cut < sum(line.context > 0 for line in forced)
    assert said == [
        f"contexts were cut to their nearest sentences ({cut}): they are longer than the model has learned to "
        "translate at once, 20 pieces, or than its maximum length"
    ]
    ids = list("aaaabcc")
    assert written(lambda out: force_file(translator, lines, given, out, document_ids=ids)) == expected
    assert written(lambda out: force_file(translator, lines, given, out, documents=False)) != expected
    with pytest.raises(DataError, match=r"the ids must have as many lines as the input.* \(7 and 1 lines\)"):
        force_file(translator, lines, given, tmp_path / "out", document_ids=["a"])
    for count, message in ((6, "as many lines as the sources"), (8, "as many lines as the sources")):
        with pytest.raises(DataError, match=message):
            force_file(translator, iter(lines), [*given, "a"][:count], io.BytesIO(), document_ids=ids)
    with pytest.raises(DataError, match="as many lines"):
        force_file(translator, iter(lines), given, io.BytesIO(), document_ids=ids[:5])


def test_a_killed_scoring_of_documents_goes_on(
    translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [*sentences(4, 5), "", *sentences(4, 7)]
    said, counts = list[str](), list[str]()
    whole = written(lambda out: force_file(translator, lines, lines, out, say=counts.append))
    monkeypatch.setattr(files, "SIDE_CHUNK", 3)
    force_lines, calls = module.force_lines, list[int]()

    def dying(engine: object, tokenizers: object, source: SourceLines, *rest: object, **more: object) -> object:
        calls.append(len(source.lines))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return force_lines(engine, tokenizers, source, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "force_lines", dying)
    with pytest.raises(KeyboardInterrupt):
        force_file(translator, lines, lines, tmp_path / "out")
    force_file(translator, lines, lines, tmp_path / "out", say=said.append)
    assert calls == [4, 5, 5]  # a chunk ends with a document
    assert [float(line) for line in (tmp_path / "out").read_text().split()] == pytest.approx([*map(float, whole)], 1e-5)
    assert said == [f"resuming after line 4, where {tmp_path / 'out.partial'} ends", *counts]
    assert counts


def test_words_of_given_translations_are_scored(translator: Translator) -> None:
    lines, given = sentences(4, 5), [*sentences(3, 6), ""]
    scored = [
        json.loads(line)
        for line in written(lambda out: force_file(translator, lines, given, out, documents=False, words=True))
    ]
    for line, target, forced in zip(scored, given, translator.force_pieces(lines, given), strict=True):
        assert line["log_prob"] == pytest.approx(forced.log_prob, abs=1e-4)
        assert [word for word, _ in line["words"]] == [*target.split(), "</s>"]
        for parts in (line["words"], line["pieces"]):
            assert sum(value for _, value in parts) == pytest.approx(line["log_prob"], abs=1e-9)


def test_a_run_is_translated_with_by_its_own_settings(trained: Trained) -> None:
    assert Translator([trained.run]).settings == trained.run.recipe.decoding
