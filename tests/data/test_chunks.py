"""Chunks of a side: the same wherever reading begins, shared out to parts, measured on the way."""

from pathlib import Path

import pytest

from mtkit.data import chunks as module
from mtkit.data.chunks import Chunk, SideText, chunks
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.storage.jobs import Part
from mtkit.terminal import silent
from mtkit.text.corpora import SegmentPair, measure_corpus

PAIRS = [SegmentPair(line, f"two dogs {line}", f"zwei Hunde {line}") for line in range(1, 24)]


def pairs_of(made: list[Chunk]) -> list[SegmentPair]:
    columns = [(chunk.lines, chunk.sources, chunk.targets, chunk.documents) for chunk in made]
    return [SegmentPair(*pair) for each in columns for pair in zip(*each, strict=True)]


def test_they_hold_every_pair_in_order_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAIRS", 5)
    monkeypatch.setattr(module, "_ALIGNED", 12)
    monkeypatch.setattr(module, "_ALIGNED_IN_CHUNK", 4)
    made = list(chunks(PAIRS, 3, "en-de"))
    assert pairs_of(made) == PAIRS
    assert [len(chunk.lines) for chunk in made] == [5, 5, 5, 5, 3]
    assert [chunk.aligned for chunk in made] == [5, 5, 4, 4, 3]
    assert {(chunk.corpus, chunk.direction) for chunk in made} == {(3, "en-de")}
    assert list(chunks(PAIRS[10:], 3, "en-de", 10)) == made[2:]
    monkeypatch.setattr(module, "_CHARACTERS", 50)
    small = list(chunks(PAIRS, 3, "en-de"))
    assert [len(chunk.lines) for chunk in small] == [3, 2, 3, 2, 3, 2, 3, 2, 3]
    assert list(chunks(PAIRS[5:], 3, "en-de", 5)) == small[2:]


def test_the_fingerprint_is_of_all_that_is_encoded() -> None:
    chunk = next(chunks(PAIRS, 0, "en-de"))
    others = [
        chunk._replace(sources=["", *chunk.sources[1:]]),
        chunk._replace(targets=[*chunk.targets[:-1], ""]),
        chunk._replace(sources=[*chunk.sources[1:], chunk.sources[0]]),
        chunk._replace(documents=[*chunk.documents[:-1], 1]),
        chunk._replace(documents=[*chunk.documents[:-1], "1"]),
        chunk._replace(lines=[*chunk.lines[:-1], 99]),
        chunk._replace(direction="de-en"),
        chunk._replace(corpus=1),
    ]
    assert len({each.fingerprint for each in (chunk, *others)}) == 9
    assert next(chunks(PAIRS, 0, "en-de")).fingerprint == chunk.fingerprint


def write(folder: Path, name: str, number: int, end: str = "\n") -> Corpus:
    """So many pairs, of several bytes a character, with blank and long lines and separators that end no line."""
    for language in ("en", "de"):
        lines = [f"{language} 犬{each}\u2028{'x' * (each % 5 * 300)}" if each % 6 else "" for each in range(number)]
        (folder / f"{name}.{language}").write_text("\n".join(lines) + end, encoding="utf-8", newline="")
    return Corpus(source=folder / f"{name}.en", target=folder / f"{name}.de")


@pytest.mark.parametrize("end", ["\n", "", "\r\n"])
@pytest.mark.parametrize("of", [1, 2, 3, 7, 40])
def test_parts_are_all_of_it_and_plain_text_is_read_from_their_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: int, end: str
) -> None:
    monkeypatch.setattr(module, "_PAIRS", 10)
    monkeypatch.setattr("mtkit.text.text_files._BUFFER", 64)
    plain, parted = write(tmp_path, "a", 83, end), write(tmp_path, "b", 34, end)
    (tmp_path / "c.tsv").write_text("".join(f"s{each}\tt{each}\n" for each in range(25)), encoding="utf-8")
    table = Corpus(file=tmp_path / "c.tsv", source="1", target="2")
    corpora = (plain, parted.model_copy(update={"documents": "empty-lines"}), table)
    settings = DataSettings(train=corpora, valid=(plain,))
    text = SideText("train", settings.train, settings)
    assert text.lines == [83, 34, None]
    assert text.pairs is None
    text.count(silent)
    assert text.lines == [83, 34, 25]
    whole = list(text.chunks(silent))
    assert text.facts == [measure_corpus(each) for each in settings.train]
    parts = [list(text.chunks_of(Part(number, of), silent)) for number in range(1, of + 1)]
    assert [chunk for part in parts for chunk in part] == whole
    for number, part in enumerate(parts):
        shares = [142 * share / of for share in (number, number + 1)]
        starts = {0: 0, 1: 83, 2: 117}
        assert all(shares[0] <= starts[each.corpus] + each.lines[0] - 1 < shares[1] for each in part)


def test_text_that_changes_or_has_unequal_sides_is_refused(tmp_path: Path) -> None:
    corpus = write(tmp_path, "a", 83)
    settings = DataSettings(train=(corpus,), valid=(corpus,))
    text = SideText("train", settings.train, settings)
    write(tmp_path, "a", 84)
    with pytest.raises(DataError, match=r"a\.de changed while it was read, from 83 lines to 84; give files"):
        list(text.chunks(silent))
    for name in ("a.en", "a.de"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError, match=r"from 83 lines to 0; give files that do not change, and no pipes"):
        list(text.chunks(silent))
    with pytest.raises(DataError, match=r"a\.de is empty"):
        list(SideText("train", settings.train, settings).chunks(silent))
    write(tmp_path, "a", 84)
    (tmp_path / "a.de").write_text("1\n2\n")
    with pytest.raises(DataError, match=r"a\.en has 84 lines and .*a\.de has 2"):
        SideText("train", settings.train, settings)


def test_the_last_chunk_of_a_long_corpus_is_sampled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAIRS", 5)
    monkeypatch.setattr(module, "_ALIGNED", 12)
    monkeypatch.setattr(module, "_ALIGNED_IN_CHUNK", 2)
    made = list(chunks(PAIRS, 0, "en-de"))
    assert [chunk.aligned for chunk in made] == [5, 5, 2, 2, 2]
    assert list(chunks(PAIRS[20:], 0, "en-de", 20)) == made[4:]
