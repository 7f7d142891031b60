import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus
from mtkit.text.corpora import (
    SegmentPair,
    measure_corpus,
    measure_file,
    name_of,
    number_documents,
    plain_files,
    read_corpus,
)

TEXTS = [("a", "x", 7), ("b\u2028", "y", 7), ("", "z", 8)]
PAIRS = [SegmentPair(line, *text) for line, text in enumerate(TEXTS, start=1)]


def lines(path: Path, *texts: object) -> Path:
    path.write_bytes("".join(f"{text}\n" for text in texts).encode())
    return path


def test_every_place_gives_the_same_pairs(tmp_path: Path) -> None:
    import datasets

    sources, targets, documents = (list(column) for column in zip(*TEXTS, strict=True))
    columns = {"en": sources, "de": targets, "doc": documents}
    rows = [dict(zip(columns, text, strict=True)) for text in TEXTS]
    lines(tmp_path / "a.jsonl", *(json.dumps(row) for row in rows))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"))
    named = {"source": "en", "target": "de", "documents": "doc"}
    for corpus in (
        Corpus(file=tmp_path / "a.jsonl", **named),
        Corpus(file=tmp_path / "b.jsonl.gz", **named),
        Corpus(file=tmp_path / "a.parquet", **named),
        Corpus(dataset=str(tmp_path / "saved"), **named),
    ):
        assert list(read_corpus(corpus)) == list(read_corpus(corpus)) == PAIRS
    text = {"source": lines(tmp_path / "a.en", *sources), "target": str(lines(tmp_path / "a.de", *targets))}
    files = Corpus(**text, documents=lines(tmp_path / "a.docids", *documents))
    table = Corpus(
        file=lines(tmp_path / "a.tsv", *("\t".join(map(str, text)) for text in TEXTS)),
        source="1",
        target="2",
        documents="3",
    )
    ids_as_text = [pair._replace(document=str(pair.document)) for pair in PAIRS]
    assert list(read_corpus(files)) == list(read_corpus(table)) == ids_as_text
    assert list(read_corpus(Corpus(**text))) == [pair._replace(document=None) for pair in PAIRS]


def test_empty_lines_on_both_sides_part_documents_and_stay(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.en", "a", "b", "", "", "", "c")
    target = lines(tmp_path / "a.de", "x", "", "", "y", "", "z")
    documents = [pair.document for pair in read_corpus(Corpus(source=source, target=target, documents="empty-lines"))]
    assert documents == [1, 1, 1, 2, 2, 3]
    table = lines(tmp_path / "a.tsv", "a\tx", "", "b\ty")
    corpus = Corpus(file=table, source="1", target="2", documents="empty-lines")
    assert list(read_corpus(corpus)) == [
        SegmentPair(1, "a", "x", 1),
        SegmentPair(2, "", "", 1),
        SegmentPair(3, "b", "y", 2),
    ]


def test_different_line_counts_are_refused_with_both(tmp_path: Path) -> None:
    source, target = lines(tmp_path / "a.en", "a", "b", "c"), lines(tmp_path / "a.de", "x", "y")
    with pytest.raises(
        DataError, match=r"a\.en has 3 lines and .*a\.de has 2; no line looks like the first that is off"
    ):
        list(read_corpus(Corpus(source=source, target=target)))
    with pytest.raises(DataError, match=r"a\.de has 2 lines and .*a\.en has 3"):
        list(read_corpus(Corpus(source=target, target=source)))


def test_a_missing_line_is_pointed_at(tmp_path: Path) -> None:
    texts = [f"Number {number} is {'long ' * (number % 7)}" for number in range(1, 301)]
    source, target = lines(tmp_path / "a.en", *texts), lines(tmp_path / "a.de", *texts[:149], *texts[150:])
    with pytest.raises(DataError, match=r"has 300 lines .* has 299; they seem to part at about line 1(49|50|51);"):
        list(read_corpus(Corpus(source=source, target=target)))


def test_ids_of_documents_must_be_as_many_as_lines(tmp_path: Path) -> None:
    source, target = lines(tmp_path / "a.en", "a", "b"), lines(tmp_path / "a.de", "x", "y")
    for ids in (("1",), ("1", "1", "2")):
        documents = lines(tmp_path / "a.docids", *ids)
        with pytest.raises(DataError, match=rf"a\.docids has {len(ids)} lines and .*a\.en has 2"):
            list(read_corpus(Corpus(source=source, target=target, documents=documents)))


def test_a_number_is_no_segment(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", '{"en": "a", "de": "x"}', '{"en": "a", "de": 5}')
    with pytest.raises(DataError, match=r"a\.jsonl, column de, line 2: a number, not text"):
        list(read_corpus(Corpus(file=path, source="en", target="de")))


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    names = {"a.csv": "; convert it", "b.xlsx": "; save it as CSV UTF-8, and then convert it with the command in docs"}
    for name in ("a.txt.gz", "a.parquet.gz", "tsv", *names):
        with pytest.raises(DataError, match=rf"{name} has an unknown format.*{names.get(name, '')}"):
            list(read_corpus(Corpus(file=tmp_path / name, source="en", target="de")))


def test_messages_name_the_file_and_the_column() -> None:
    files = Corpus(source="a/train.en", target="a/train.de")
    assert [name_of(files), name_of(files, "source"), name_of(files, "target")] == [
        "a/train.en and a/train.de",
        "a/train.en",
        "a/train.de",
    ]
    table = Corpus(file="train.tsv", source="1", target="2")
    assert [name_of(table), name_of(table, "target")] == ["train.tsv", "train.tsv, column 2"]
    hub = Corpus(dataset="wmt14", subset="de-en", source="translation.en", target="translation.de")
    assert name_of(hub, "source") == "wmt14 de-en train, column translation.en"


def test_a_pair_without_text_is_the_last_of_its_document() -> None:
    texts = [("a", "x"), ("", ""), ("b", ""), ("", "y"), ("", ""), ("", "")]
    pairs = [SegmentPair(line, *text) for line, text in enumerate(texts, start=1)]
    parted = list(number_documents(pairs))
    assert [pair.document for pair in parted] == [1, 1, 2, 2, 2, 3]
    assert [pair[:3] for pair in parted] == [pair[:3] for pair in pairs]


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
    target = "plain\n" * 1_200 + "FuÃŸ\n" * 3 + "plain\n" * 299 + '"a ""b"" c"\n"""x"""\n'
    facts = measure_corpus(pair(tmp_path, "a", source, target))
    assert facts.oddities == {
        "entities": {"source": [3, 1_501]},
        "wrongly_decoded": {"target": [3, 1_201]},
        "invisible": {"source": [1, 1_502]},
        "doubled_quotes": {"target": [1, 1_503]},
        "quoted": {"target": [2, 1_503]},
    }
    assert measure_corpus(pair(tmp_path, "b", "plain\n", "schlicht\n")).oddities == {}


def test_lines_of_a_pipe_are_not_counted_in_advance(tmp_path: Path) -> None:
    corpus = pair(tmp_path, "a", "a\n", "x\n")
    assert plain_files(corpus) == [tmp_path / "a.en", tmp_path / "a.de"]
    os.mkfifo(tmp_path / "pipe")
    assert plain_files(corpus.model_copy(update={"source": tmp_path / "pipe"})) is None


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
