from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtkit.errors import DataError
from mtkit.text.readers import Repairs
from mtkit.text.readers.sets import parquet_rows


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_rows_come_in_order_across_row_groups(tmp_path: Path) -> None:
    texts = [f"line {number}" for number in range(25)]
    path = write(tmp_path / "a.parquet", {"en": texts, "other": texts, "de": texts[::-1]}, row_group_size=4)
    rows = list(parquet_rows(path, ["en", "de"], Repairs()))
    assert rows == [(n, [text, other]) for n, (text, other) in enumerate(zip(texts, texts[::-1], strict=True), start=1)]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_text_is_text_however_it_is_stored(tmp_path: Path, kind: pa.DataType) -> None:
    path = write(tmp_path / "a.parquet", {"en": pa.array(["a", "b", "a"]).cast(kind)})
    assert [row for _, row in parquet_rows(path, ["en"], Repairs())] == [["a"], ["b"], ["a"]]


def test_columns_may_be_nested_or_have_a_dot_in_their_name(tmp_path: Path) -> None:
    pairs = [{"en": "a", "de": "x", "fr": "1"}, {"en": "b", "de": "y", "fr": "2"}]
    path = write(tmp_path / "a.parquet", {"translation": pairs, "plain.name": ["p", "q"]})
    columns = ["translation.en", "translation.de", "plain.name"]
    rows = [row for _, row in parquet_rows(path, columns, Repairs())]
    assert rows == [["a", "x", "p"], ["b", "y", "q"]]


def test_newlines_inside_a_field_become_spaces_and_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"en": ["a\nb\r\nc\n", "d\u2028e", "f\r", "g\rh"]})
    repairs = Repairs()
    rows = [row for _, row in parquet_rows(path, ["en"], repairs)]
    assert rows == [["a b c"], ["d\u2028e"], ["f"], ["g\rh"]]
    assert repairs == Repairs(carriage_returns=1, inner_newlines=1)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("fr", "no column fr; there is en, pair.de, score, words, ids"),
        ("pair.fr", "no column pair.fr"),
        ("pair", "column pair holds struct<.*>, not text"),
        ("score", "column score holds double, not text"),
        ("words", "column words holds list<.*>, not text"),
    ],
)
def test_a_column_that_is_no_text_is_named(tmp_path: Path, column: str, message: str) -> None:
    columns = {"en": ["a"], "pair": [{"de": "x"}], "score": [0.5], "words": [["a", "b"]], "ids": [1]}
    path = write(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=rf"a\.parquet.*{message}"):
        list(parquet_rows(path, [column], Repairs()))


def test_a_name_that_two_columns_have_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["en", "en"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several columns en"):
        list(parquet_rows(tmp_path / "a.parquet", ["en"], Repairs()))


def test_one_column_may_be_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"en": ["a"], "pair": [{"de": "x"}]})
    columns = ["en", "en", "pair.de", "pair.de"]
    assert [row for _, row in parquet_rows(path, columns, Repairs())] == [["a", "a", "x", "x"]]


def test_a_null_is_named_with_its_row(tmp_path: Path) -> None:
    texts = [None if number == 13_000 else "a" for number in range(1, 15_001)]
    path = write(tmp_path / "a.parquet", {"pair": [{"de": text} for text in texts]})
    with pytest.raises(DataError, match=r"a\.parquet, row 13000: column pair\.de holds nothing"):
        list(parquet_rows(path, ["pair.de"], Repairs()))


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    bad = pa.StringArray.from_buffers(1, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff"))
    with pytest.raises(DataError, match=r"a\.parquet.*en is not UTF-8"):
        list(parquet_rows(write(tmp_path / "a.parquet", {"en": bad}), ["en"], Repairs()))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"en": ["a"] * 1000})
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"not Parquet at all", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.parquet is not a valid Parquet file \(.+\)"):
            list(parquet_rows(path, ["en"], Repairs()))
    with pytest.raises(DataError, match="no file"):
        list(parquet_rows(tmp_path / "none.parquet", ["en"], Repairs()))
