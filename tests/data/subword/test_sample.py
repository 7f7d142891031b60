"""The sample that a tokenizer is trained on: the same however the text comes, and of large text a part."""

from pathlib import Path

import pytest

from mtkit.data.progress import silent
from mtkit.data.readers import SegmentPair
from mtkit.data.subword import sample as module
from mtkit.data.subword.sample import SOURCE, TARGET, TextSample
from mtkit.recipe.data import Corpus

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
        assert not sample
        for start in range(0, len(PAIRS), chunk):
            some = PAIRS[start : start + chunk]
            sample.add(some, size(some))
        assert sample
        for _ in range(2):
            assert list(sample.lines(SOURCE)) == [pair.source for pair in PAIRS[::every]]
        targets = [pair.target for pair in PAIRS[::every]]
        assert list(sample.lines(SOURCE, TARGET))[len(targets) :] == targets
        sample.fold(lambda lines: [line.upper() + "!" for line in lines])
        assert list(sample.lines(SOURCE)) == [pair.source + "!" for pair in PAIRS[::every]]
        assert list(sample.lines(TARGET)) == targets


def test_it_is_the_same_of_text_that_is_read_for_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BYTES", 2000)
    monkeypatch.setattr(module, "_CHUNK", 64)
    pairs = [pair._replace(target=pair.target.rstrip("\r")) for pair in PAIRS]
    (tmp_path / "a.en").write_text("".join(f"{pair.source}\n" for pair in pairs), encoding="utf-8", newline="")
    (tmp_path / "a.de").write_text("".join(f"{pair.target}\n" for pair in pairs), encoding="utf-8", newline="")
    with TextSample() as one, TextSample() as other:
        one.read([Corpus(source=tmp_path / "a.en", target=tmp_path / "a.de")], silent)
        other.add(pairs, size(pairs))
        assert list(one.lines(SOURCE, TARGET)) == list(other.lines(SOURCE, TARGET))
        assert 0 < len(list(one.lines(SOURCE))) < len(pairs)
