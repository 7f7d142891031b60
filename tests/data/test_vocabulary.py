"""The sample that a tokenizer is trained on: the same however the text comes, and of large text a part."""

from pathlib import Path

import pytest

from mtkit.data import vocabulary as module
from mtkit.data.vocabulary import SOURCE, TARGET, TextSample
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus
from mtkit.terminal import silent
from mtkit.text.corpora import SegmentPair

PAIRS = [SegmentPair(line, f"狗 {line}\u2028", "" if line % 5 == 0 else f"dog {line}\r") for line in range(1, 300)]


def size(pairs: list[SegmentPair]) -> int:
    return sum(len(f"{pair.source}\n{pair.target}\n".encode()) for pair in pairs)


@pytest.mark.parametrize("chunk", [1, 7, 100, 299])
@pytest.mark.parametrize("most", [100, 1000, 3000, 1 << 26])
def test_it_is_every_so_many_pairs_whatever_they_come_in(
    chunk: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BYTES", most)
    every = next(2**power for power in range(20) if size(PAIRS) <= most * 2**power)
    with TextSample() as sample:
        for start in range(0, len(PAIRS), chunk):
            some = PAIRS[start : start + chunk]
            sample.add(some, size(some))
        for _ in range(2):
            assert list(sample.lines(SOURCE)) == [pair.source for pair in PAIRS[::every]]
        targets = [pair.target for pair in PAIRS[::every]]
        assert list(sample.lines(SOURCE, TARGET))[len(targets) :] == targets
        sample.fold(lambda lines: [line.upper() + "!" for line in lines])
        assert list(sample.lines(SOURCE)) == [pair.source + "!" for pair in PAIRS[::every]]
        assert list(sample.lines(TARGET)) == targets


def write(folder: Path, pairs: list[SegmentPair]) -> Corpus:
    for language, side in (("en", 1), ("de", 2)):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        (folder / f"a.{language}").write_text(text, encoding="utf-8", newline="")
    return Corpus(source=folder / "a.en", target=folder / "a.de")


@pytest.mark.parametrize("kind", ["plain", "table"])
def test_small_text_and_tables_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)
    monkeypatch.setattr(module, "_BYTES", 2000 if kind == "table" else 1 << 16)
    pairs = [pair._replace(source=f"dog {pair.line}", target=f"Hund {pair.line}") for pair in PAIRS]
    corpus = write(tmp_path, pairs)
    if kind == "table":
        table = tmp_path / "a.tsv"
        table.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in pairs))
        corpus = Corpus(file=table, source="1", target="2")
    with TextSample() as one, TextSample() as other:
        assert one.read([corpus], silent) == [len(pairs)]
        other.add(pairs, size(pairs))
        assert list(one.lines(SOURCE, TARGET)) == list(other.lines(SOURCE, TARGET))
        assert one.fingerprint == other.fingerprint
        assert (len(list(one.lines(SOURCE))) < len(pairs)) == (kind == "table")


def test_of_much_plain_text_whole_lines_are_read_that_are_spread_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BYTES", 1000)
    monkeypatch.setattr(module, "_BLOCK", 50)
    corpus = write(tmp_path, [pair._replace(target=pair.target.rstrip("\r")) for pair in PAIRS])
    with TextSample() as sample:
        assert sample.read([corpus, corpus], silent) is None
        for side, all_lines in ((SOURCE, [pair.source for pair in PAIRS]), (TARGET, [f"dog {n}" for n in range(300)])):
            found = list(sample.lines(side))
            assert set(found) <= {"", *all_lines}
            assert found[: len(found) // 2] == found[len(found) // 2 :]
            numbers = [int(line.split()[1]) for line in found[: len(found) // 2] if line]
            assert numbers == sorted(numbers)
            assert len(numbers) == len(set(numbers))
            assert numbers[0] < 30
            assert numbers[-1] > 220
        assert 500 < sum(len(f"{line}\n".encode()) for line in sample.lines(SOURCE, TARGET)) < 1500
        before = sample.fingerprint
    other = tmp_path / "other"
    other.mkdir()
    with TextSample() as sample:
        sample.read([write(other, PAIRS)], silent)
        assert sample.fingerprint != before


def test_a_line_that_is_no_text_is_named_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BYTES", 100)
    corpus = write(tmp_path, PAIRS)
    path = tmp_path / "a.de"
    path.write_bytes(path.read_bytes().replace(b"dog 71\r", b"dog \xff"))
    with TextSample() as sample, pytest.raises(DataError, match=r"a\.de, line 71: not UTF-8"):
        sample.read([corpus], silent)
