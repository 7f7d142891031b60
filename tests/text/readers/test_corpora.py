import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus
from mtkit.text.readers import SegmentPair, name_of, read_corpus

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
    for name in ("a.csv", "a.txt.gz", "a.parquet.gz", "tsv"):
        with pytest.raises(DataError, match=rf"{name} has an unknown format"):
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
