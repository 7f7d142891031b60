"""Translations in the run's folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtkit.decoding.held_out import HeldOut, Speed, held_out, n_best_lines, save
from mtkit.decoding.lines.source import Documents
from mtkit.decoding.translation import Translation
from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.systems import run_sides
from mtkit.runs import Run
from tests.decoding.trained import make_run

SIDE = HeldOut("test", ["a", "b\u2028"], ["x", "y"])


def translation(text: str, score: float = -1.0) -> Translation:
    return Translation(text, score, score, (4, 3))


def test_the_test_side_is_taken_or_else_the_validation_side(tmp_path: Path) -> None:
    both = held_out(make_run(tmp_path / "both").prepared)
    assert both.name == "test"
    assert list(both.sources) == (tmp_path / "both" / "test.source").read_text().split("\n")[:-1]
    assert list(both.references) == (tmp_path / "both" / "test.target").read_text().split("\n")[:-1]
    assert held_out(make_run(tmp_path / "one", test_side=False).prepared).name == "valid"


def test_sides_are_named(tmp_path: Path) -> None:
    prepared = make_run(tmp_path, sides=("flickr", "coco")).prepared
    assert held_out(prepared).name == "flickr"
    assert held_out(prepared, "coco").sources == (tmp_path / "coco.source").read_text().split("\n")[:-1]
    assert held_out(prepared, "valid").sources == (tmp_path / "valid.source").read_text().split("\n")[:-1]
    with pytest.raises(DataError, match="did you mean 'coco'"):
        held_out(prepared, "cocoa")


def test_directions_are_written_beside(tmp_path: Path) -> None:
    trained = make_run(tmp_path, directions=("en-de", "en-fr"))
    side = held_out(trained.prepared)
    assert side.directions is not None
    assert list(side.directions.tasks) == [0] * 7 + [1] * 7
    path = save(trained.run, side.sample(9), [[translation("x")]] * 9, Speed(1.0, 9, 9), {})
    directions = path.with_suffix(".direction.txt")
    assert directions.read_text() == "en-de\n" * 4 + "en-fr\n" * 5
    save(trained.run, SIDE, [[translation("x")]] * 2, Speed(1.0, 2, 2), {})
    assert not directions.exists()


def test_document_ids_are_written_beside(tmp_path: Path) -> None:
    run, found = Run(tmp_path), [[translation("x")]] * 2
    path = save(run, replace(SIDE, document_ids=[4, 7]), found, Speed(1.0, 2, 2), {})
    ids = path.with_suffix(".docids.txt")
    assert ids.read_text() == "4\n7\n"
    save(run, SIDE, found, Speed(1.0, 2, 2), {})
    assert not ids.exists()


def test_a_side_of_documents_has_ids_if_training_was_on_sentences(tmp_path: Path) -> None:
    """So `mtkit score --documents` scores a run that translates line by line."""
    prepared = make_run(tmp_path, documents=50).prepared
    side = held_out(prepared)
    assert side.documents is not None
    settings = prepared.settings.model_copy(update={"documents": None})
    by_lines = held_out(replace(prepared, settings=settings))
    assert by_lines.documents is None
    assert by_lines.document_ids == side.document_ids == side.documents.ids


def test_a_sample_has_the_first_segments_of_every_corpus(tmp_path: Path) -> None:
    trained = make_run(tmp_path, directions=("en-de", "en-fr"))
    side = held_out(trained.prepared, "valid")
    assert side.corpora == [7, 7]
    part = side.sample(5)
    assert list(part.sources) == [*side.sources[:2], *side.sources[7:10]]
    assert list(part.references) == [*side.references[:2], *side.references[7:10]]
    assert part.directions is not None
    assert list(part.directions.tasks) == [0, 0, 1, 1, 1]
    assert side.sample(14) == side.sample(99) == side


@pytest.mark.parametrize(
    ("corpora", "segments", "taken"),
    [
        ([10], 3, [3]),
        ([900, 100], 10, [9, 1]),
        ([999, 1], 10, [9, 1]),
        ([1, 999], 10, [1, 9]),
        ([0, 5, 5], 4, [0, 2, 2]),
        ([3, 3, 3], 2, [1, 1, 0]),
        ([2, 1], 3, [2, 1]),
    ],
)
def test_a_sample_has_some_of_each_corpus_where_it_can(corpora: list[int], segments: int, taken: list[int]) -> None:
    lines = [f"{corpus} {line}" for corpus, size in enumerate(corpora) for line in range(size)]
    found = HeldOut("valid", lines, lines, corpora=corpora).sample(segments)
    assert list(found.sources) == [f"{corpus} {line}" for corpus, size in enumerate(taken) for line in range(size)]
    assert found.references == found.sources


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    valid = HeldOut("valid", ["a"], ["x"])
    save(run, valid, [[translation("v")]], Speed(1.0, 1, 2), {})
    path = save(
        run, SIDE, [[translation("one"), translation("uno", -2)], [translation("")] * 2], Speed(2.0, 2, 4), {"c": 1}
    )
    (files,) = run_sides([run], ["test"])["test"]
    assert files.hypothesis == path
    assert path.read_bytes() == b"one\n\n"
    assert [each.read_bytes() for each in files.references] == [b"x\ny\n"]
    assert files.source is not None
    assert files.source.read_text() == "a\nb\u2028\n"
    assert path.with_suffix(".nbest.txt").read_text().split("\n")[1] == "1\t-2.000000\tuno"
    record = json.loads(path.with_suffix(".json").read_text())
    assert (record["c"], record["segments"], record["segments_per_second"], record["tokens_per_second"]) == (1, 2, 1, 2)
    save(run, SIDE, [[translation("one")], [translation("two")]], Speed(2.0, 2, 4), {})
    assert not path.with_suffix(".nbest.txt").exists()
    assert list(run_sides([run])) == ["valid", "test"]


def test_n_best_lines_name_their_line_and_have_three_fields() -> None:
    several = [[translation("a"), translation("b", -2)], [translation("c\tc")]]
    lines = list(n_best_lines(several))
    assert [line[0] for line in n_best_lines(several, first=6)] == ["7", "7", "8"]
    assert lines == ["1\t-1.000000\ta", "1\t-2.000000\tb", "2\t-1.000000\tc c"]


@pytest.mark.parametrize("link", ["translations", "translations/test.source.txt", "translations/test.json"])
def test_nothing_is_written_through_a_link_in_the_run_folder(tmp_path: Path, link: str) -> None:
    run, home = Run(tmp_path / "run"), tmp_path / "home"
    home.mkdir()
    (home / "theirs").write_text("words")
    (run.folder / link).parent.mkdir(parents=True)
    (run.folder / link).symlink_to(home if link == "translations" else home / "theirs")
    with pytest.raises(MtkitError, match=f"{link} is a link, and mtkit writes only real files in .*run; replace it"):
        save(run, SIDE, [[translation("one")], [translation("two")]], Speed(2.0, 2, 4), {})
    assert [each.name for each in home.iterdir()] == ["theirs"]
    assert (home / "theirs").read_text() == "words"


def test_a_sample_has_the_documents_of_its_segments() -> None:
    lines = [str(number) for number in range(6)]
    side = HeldOut("valid", lines, lines, documents=Documents([0, 0, 1, 2, 2, 3], 50), corpora=[3, 3])
    part = replace(side, document_ids=[0, 0, 1, 2, 2, 3]).sample(4)
    assert part.documents == Documents([0, 0, 2, 2], 50)
    assert part.document_ids == [0, 0, 2, 2]
    assert list(part.sources) == ["0", "1", "3", "4"]
