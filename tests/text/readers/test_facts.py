import gzip
from pathlib import Path

import pytest

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus
from mtkit.text.readers import measure_corpus, measure_file


def pair(folder: Path, name: str, source: str, target: str, documents: str = "") -> Corpus:
    texts = {"en": source, "de": target, "docids": documents}
    paths = {kind: folder / f"{name}.{kind}" for kind, text in texts.items() if text}
    for kind, path in paths.items():
        path.write_bytes(texts[kind].encode())
    return Corpus(source=paths["en"], target=paths["de"], documents=paths.get("docids"))


def test_all_is_counted(tmp_path: Path) -> None:
    facts = measure_corpus(pair(tmp_path, "a", "\ufeffa\r\nb\u2028c\n", "ü\r\nyy\u2029\r\n"))
    assert (facts.lines, facts.bytes) == (2, len("a\nb\u2028c\nü\nyy\u2029\n".encode()))
    assert (facts.carriage_returns, facts.byte_order_marks, facts.line_separators, facts.inner_newlines) == (3, 1, 2, 0)
    assert facts.inner_carriage_returns == 0
    assert measure_corpus(pair(tmp_path, "b", "a\r\r\nb\rc\n", "x\ny\n")).inner_carriage_returns == 2


def test_odd_lines_are_counted_by_side_with_the_first_of_them(tmp_path: Path) -> None:
    source = "plain\n" * 1_500 + "a &amp; b\nc\td\n" + "e &amp; f\n" * 2
    target = "plain\n" * 1_200 + "FuÃŸ\n" * 3 + "plain\n" * 301
    facts = measure_corpus(pair(tmp_path, "a", source, target))
    assert facts.oddities == {
        "entities": {"source": [3, 1_501]},
        "wrongly_decoded": {"target": [3, 1_201]},
        "invisible": {"source": [1, 1_502]},
    }
    assert measure_corpus(pair(tmp_path, "b", "plain\n", "schlicht\n")).oddities == {}


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    one = measure_corpus(pair(tmp_path, "one", "a\nb\n", "x\ny\n"))
    (tmp_path / "a.tsv").write_text("x\ta\ny\tb\n")
    (tmp_path / "a.en.gz").write_bytes(gzip.compress(b"a\r\nb"))
    table = Corpus(file=tmp_path / "a.tsv", source="2", target="1")
    zipped = Corpus(source=tmp_path / "a.en.gz", target=tmp_path / "one.de")
    assert one.sha256 == measure_corpus(table).sha256 == measure_corpus(zipped).sha256
    others = [
        pair(tmp_path, "other", "a\nb\n", "x\nz\n"),
        pair(tmp_path, "swapped", "x\ny\n", "a\nb\n"),
        pair(tmp_path, "shifted", "a\nx\n", "b\ny\n"),
        pair(tmp_path, "documents", "a\nb\n", "x\ny\n", "1\n2\n"),
        pair(tmp_path, "other_documents", "a\nb\n", "x\ny\n", "1\n1\n"),
    ]
    assert len({one.sha256, *(measure_corpus(other).sha256 for other in others)}) == 1 + len(others)


def test_the_fingerprint_is_of_all_the_lines(tmp_path: Path) -> None:
    text = "a\n" * 25_000
    facts = [measure_corpus(pair(tmp_path, "a", text + last, text + "b\n")) for last in ("b\n", "c\n")]
    assert facts[0].lines == 25_001
    assert facts[0].sha256 != facts[1].sha256


def test_progress_sees_every_pair(tmp_path: Path) -> None:
    seen = []

    def progress(items, what, total):  # type: ignore[no-untyped-def]
        for item in items:
            seen.append((what, total))
            yield item

    corpus = pair(tmp_path, "a", "a\nb\n", "x\ny\n")
    measure_corpus(corpus, progress)
    assert seen == [(f"reading {tmp_path}/a.en and {tmp_path}/a.de", None)] * 2


def test_nothing_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("en\tde\n")
    with pytest.raises(DataError, match=r"a\.tsv is empty"):
        measure_corpus(Corpus(file=tmp_path / "a.tsv", source="en", target="de"))
    (tmp_path / "a.en").touch()
    with pytest.raises(DataError, match=r"a\.en is empty"):
        measure_file(tmp_path / "a.en")
