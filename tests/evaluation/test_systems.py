"""The files of several systems: found, read, and held against each other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtkit.errors import DataError, MtkitError, RunError
from mtkit.evaluation.systems import Translated, read_texts, run_sides, system_names
from mtkit.runs import Run

LINES = ["the old dog", "two birds"]


def written(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def translated(run: Run, side: str, *, finished: str, checkpoint: str = "update-1", **more: object) -> None:
    folder = run.folder / "translations"
    for suffix in (".txt", ".reference.txt", ".source.txt"):
        written(folder / f"{side}{suffix}", LINES)
    (folder / f"{side}.json").write_text(json.dumps({"finished": finished, "checkpoint": checkpoint, **more}))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "one")
    translated(run, "test", finished="2026-01-02")
    translated(run, "flickr.2017", finished="2026-01-03")
    translated(run, "old", finished="2026-01-01", checkpoint="update-0")
    return run


def test_the_sides_are_those_of_the_latest_checkpoint_in_order(run: Run) -> None:
    sides = run_sides([run])
    assert list(sides) == ["test", "flickr.2017"]
    (found,) = sides["flickr.2017"]
    folder = run.folder / "translations"
    assert found == Translated(
        "one",
        folder / "flickr.2017.txt",
        (folder / "flickr.2017.reference.txt",),
        folder / "flickr.2017.source.txt",
    )
    assert list(run_sides([run], ["old", "test", "old"])) == ["old", "test"]


def test_records_without_references_are_no_sides(run: Run) -> None:
    (run.folder / "translations" / "half-done.json").write_text("{")
    assert list(run_sides([run])) == ["test", "flickr.2017"]


def test_every_run_must_have_the_side(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "two")
    translated(other, "test", finished="2026-01-02", checkpoint="update-7")
    (both,) = run_sides([run, other], ["test"]).values()
    assert [each.system for each in both] == ["one", "two"]
    with pytest.raises(RunError, match=r"two has no translations of a side 'flickr.2017'; it has: test; choose with"):
        run_sides([run, other])
    with pytest.raises(RunError, match="did you mean 'test'"):
        run_sides([run], ["tset"])


def test_what_a_run_translated_in_an_ensemble_is_not_compared_with_others_by_themselves(
    run: Run, tmp_path: Path
) -> None:
    translated(run, "test+two", finished="2026-01-09", checkpoint="update-1, update-7", ensemble=["one", "two"])
    other = Run(tmp_path / "two")
    for side in ("test", "flickr.2017"):
        translated(other, side, finished="2026-01-02", checkpoint="update-7")
    assert list(run_sides([run, other])) == ["test", "flickr.2017"]
    assert list(run_sides([run])) == ["test+two"]


def test_runs_of_the_same_name_are_told_apart(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "elsewhere" / "one")
    translated(other, "test", finished="2026-01-02")
    (both,) = run_sides([run, other], ["test"]).values()
    assert [each.system for each in both] == [str(run.folder), str(other.folder)]


def test_a_run_has_the_name_of_its_folder_wherever_the_process_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.folder)
    assert system_names([Run(Path())]) == system_names([run]) == ["one"]


def test_a_run_without_translations_or_with_damaged_ones_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"mtkit translate --run .*empty"):
        run_sides([Run(tmp_path / "empty")])
    for damage in ("{", "[]", "{}"):
        (run.folder / "translations" / "test.json").write_text(damage)
        with pytest.raises(RunError, match=r"test\.json is damaged"):
            run_sides([run])


def test_texts_are_read_beside_each_other(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one", ["a", "b"]), written(tmp_path / "two", ["c", "d"])
    reference = written(tmp_path / "reference", LINES)
    files = [Translated(each.name, each, (reference,)) for each in (one, two)]
    texts = read_texts(files)
    assert (texts.hypotheses, texts.references) == ([["a", "b"], ["c", "d"]], [LINES])
    assert (texts.sources, texts.directions) == (None, None)
    directed = [replace(each, source=one, direction=written(tmp_path / "way", ["en-fr", "en-de"])) for each in files]
    assert read_texts(directed).directions == ["en-fr", "en-de"]
    assert read_texts(directed, sources=True).sources == ["a", "b"]
    with pytest.raises(MtkitError, match="is unknown; give it with --source"):
        read_texts(files, sources=True)


def test_files_that_do_not_belong_together_are_both_named(tmp_path: Path) -> None:
    paths = {
        name: written(tmp_path / name, lines)
        for name, lines in {"two": LINES, "other": [LINES[0], "x"], "three": [*LINES, "x"], "copy": LINES}.items()
    }

    def system(
        hypothesis: str = "two", reference: str = "two", source: str = "two", direction: str = "two"
    ) -> Translated:
        return Translated("s", paths[hypothesis], (paths[reference],), paths[source], paths[direction])

    read_texts([system(), system(reference="copy", source="copy")], sources=True)
    for files, message in [
        ([system("three")], "three has 3 lines and .*two has 2"),
        ([system(), system("three")], "three has 3 lines and .*two has 2"),
        ([system(), system(reference="other")], "two and .*other differ in line 2; compare systems"),
        ([system(), system(reference="three")], "two has 2 lines and .*three has 3; compare systems"),
        ([system(), system(source="other")], "two and .*other differ in line 2"),
        ([system(source="three")], "two has 2 lines and .*three has 3"),
        ([system(direction="three")], "two has 2 lines and .*three has 3"),
    ]:
        with pytest.raises(DataError, match=message) as raised:
            read_texts(files, sources=True)
        assert "\n" not in str(raised.value)


def test_sources_are_compared_even_if_they_are_not_needed(tmp_path: Path) -> None:
    text, other = written(tmp_path / "text", LINES), written(tmp_path / "other", [LINES[0], "x"])
    files = [Translated("one", text, (text,), text), Translated("two", text, (text,), other)]
    with pytest.raises(DataError, match=r"text and .*other differ in line 2; compare systems"):
        read_texts(files)


def test_document_ids_come_from_the_first_system_that_has_them(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "two")
    translated(other, "test", finished="2026-01-02")
    ids = written(other.folder / "translations" / "test.docids.txt", ["1", "1"])
    (both,) = run_sides([run, other], ["test"]).values()
    assert [each.documents for each in both] == [None, ids]
    texts = read_texts(both, documents=True)
    assert (texts.documents, texts.sources) == (["1", "1"], LINES)
    assert read_texts(both).documents is None
    written(ids, ["1"])
    with pytest.raises(DataError, match=r"test.txt has 2 lines and .*test.docids.txt has 1"):
        read_texts(both, documents=True)
