import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus
from mtkit.text.corpora import read_corpus
from mtkit.text.tables import dataset_rows, jsonl_rows, parquet_rows, tsv_rows
from mtkit.text.text_files import Repairs

Read = Callable[..., list[Any]]


@pytest.fixture
def tsv(tmp_path: Path) -> Read:
    """Writes a TSV file and reads columns of it."""

    def read(text: str, *columns: str, gaps: bool = False) -> list[Any]:
        (tmp_path / "a.tsv").write_bytes(text.encode())
        return list(tsv_rows(tmp_path / "a.tsv", columns, Repairs(), gaps=gaps))

    return read


@pytest.fixture
def jsonl(tmp_path: Path) -> Read:
    """Writes a JSONL file and reads columns of it."""

    def read(text: str, *columns: str, gaps: bool = False, repairs: Repairs | None = None) -> list[Any]:
        (tmp_path / "a.jsonl").write_bytes(text.encode())
        return list(jsonl_rows(tmp_path / "a.jsonl", columns, repairs or Repairs(), gaps=gaps))

    return read


def test_columns_by_name_have_a_header_and_by_number_none(tsv: Read) -> None:
    assert tsv("en\tid\tde\na\t1\tx\nb\t2\ty\n", "en", "de") == [(2, ["a", "x"]), (3, ["b", "y"])]
    assert tsv("a\t1\tx\nb\t2\ty\n", "1", "3") == [(1, ["a", "x"]), (2, ["b", "y"])]
    assert tsv("\ufeffen\tde\r\na\tx\r\n", "de", "en") == [(2, ["x", "a"])]


def test_a_recipe_gives_columns_by_number_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tx\n")
    corpus = Corpus.model_validate({"file": str(tmp_path / "a.tsv"), "source": 2, "target": 1})
    assert [pair[1:3] for pair in read_corpus(corpus)] == [("x", "a")]


def test_nothing_but_tabs_and_newlines_parts_fields(tsv: Read) -> None:
    text = '"a\tb"\n\'c\tit\'s "d\u2028e\x0b\x85\n\t\n \t a \n'
    assert [cells for _, cells in tsv(text, "1", "2")] == [
        ['"a', 'b"'],
        ["'c", "it's \"d\u2028e\x0b\x85"],
        ["", ""],
        [" ", " a "],
    ]


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("en\tde\na\tx\nb\n", ("en", "de"), "a.tsv, line 3: 1 field, but the first line has 2"),
        ('a\t"x\ny"\n', ("1", "2"), "a.tsv, line 2: 1 field, .*quotes protect neither a tab nor a line end"),
        ("a\tx\nb\ty\tz\n", ("1", "2"), "a.tsv, line 2: 3 fields, but the first line has 2"),
        ("a\tx\n\nb\ty\n", ("1", "2"), "a.tsv, line 2: 1 field, "),
        ("a\tx\n", ("1", "3"), "columns 1 to 2, so not all of 1, 3"),
        ("a\tx\n", ("0", "1"), "columns 1 to 2, so not all of 0, 1"),
        ("en\tde\n", ("en", "fr"), r"no column 'fr' in its first line \(en, de\)"),
        ("en\ten\n", ("en",), "several columns 'en'"),
        ("en\tde\n", ("en", "2"), "all by name or all by number"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tsv: Read, text: str, columns: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tsv(text, *columns)


def test_an_empty_line_is_a_row_where_it_ends_a_document(tsv: Read, jsonl: Read) -> None:
    for gap in ("", "  ", "\t"):  # blank is as good as empty, as in text files
        rows = [(2, ["a", "x"]), (3, ["", ""]), (4, ["b", "y"])]
        assert tsv(f"en\tde\na\tx\n{gap}\nb\ty\n", "en", "de", gaps=True) == rows
        assert jsonl(f'{{"a": "x"}}\n{gap}\n{{"a": "y"}}\n', "a", gaps=True) == [(1, ["x"]), (2, [""]), (3, ["y"])]


def test_keys_may_be_nested_or_have_a_dot(jsonl: Read, tmp_path: Path) -> None:
    rows = [{"pair": {"en": f"a{n}", "de": "ü\u2028"}, "a.b": "c", "doc": n} for n in range(3)]
    text = "".join(json.dumps(row, ensure_ascii=bool(n)) + "\n" for n, row in enumerate(rows))
    expected = [(n + 1, [f"a{n}", "ü\u2028", "c", n]) for n in range(3)]
    columns = ("pair.en", "pair.de", "a.b", "doc")
    assert jsonl(text, *columns) == expected
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert list(jsonl_rows(tmp_path / "a.jsonl.gz", columns, Repairs(), gaps=False)) == expected


def test_newlines_inside_a_string_become_spaces_and_are_counted(jsonl: Read) -> None:
    repairs = Repairs()
    assert jsonl('{"a": "x\\ny\\r\\nz\\n"}\n{"a": "x\\r"}\r\n', "a", repairs=repairs) == [(1, ["x y z"]), (2, ["x"])]
    assert repairs == Repairs(carriage_returns=2, inner_newlines=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": "x"', "not JSON"),
        ("", "not JSON .the line is empty"),
        ('["a"]', "a list, not a JSON object"),
        ('"a"', "a string, not a JSON object"),
        ('{"b": "x", "c": 1}', "no key 'a'; there is b, c"),
        ("{}", "no key 'a'; there is none"),
        ('{"a": null}', "'a' holds null, not text"),
        ('{"a": ["x"]}', "'a' holds a list, not text"),
        ('{"a": {"en": "x"}}', "'a' holds an object, not text"),
        ('{"a": true}', "'a' holds true or false, not text"),
        ('{"a": "x\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_line_that_holds_no_text_is_named(jsonl: Read, line: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {message}") as raised:
        jsonl(f'{{"a": "x"}}\n{line}\n{{"a": "y"}}\n', "a")
    assert "\n" not in str(raised.value)


def test_a_whole_surrogate_pair_is_one_character(jsonl: Read) -> None:
    assert jsonl('{"a": "\\ud83d\\ude00"}\n', "a") == [(1, ["😀"])]


PAIRS = [{"translation": {"de": f"Zeile {number}", "en": f"line {number}"}, "id": number} for number in range(2_500)]
COLUMNS = ["translation.en", "translation.de", "id"]
ROWS = [(number, [f"line {number - 1}", f"Zeile {number - 1}", number - 1]) for number in range(1, 2_501)]


@pytest.fixture(scope="module")
def pairs() -> datasets.Dataset:
    return datasets.Dataset.from_list(PAIRS)


def read(name: str, split: str = "train", subset: str | None = None, *, streaming: bool = False) -> list[Any]:
    return list(dataset_rows(name, subset, split, COLUMNS, Repairs(), streaming=streaming))


def test_a_saved_folder_is_read_split_by_split(tmp_path: Path, pairs: datasets.Dataset) -> None:
    splits = {"train": pairs, "test": pairs.select(range(3))}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert read(str(tmp_path / "saved")) == ROWS
    assert read(str(tmp_path / "saved"), "test") == ROWS[:3]
    with pytest.raises(DataError, match="no split 'valid'; give one of: train, test"):
        read(str(tmp_path / "saved"), "valid")


def test_a_saved_set_without_splits_answers_to_its_own_name(tmp_path: Path, pairs: datasets.Dataset) -> None:
    pairs.save_to_disk(str(tmp_path / "saved"))
    assert read(str(tmp_path / "saved")) == ROWS
    with pytest.raises(DataError, match="no split 'test'; give one of: train"):
        read(str(tmp_path / "saved"), "test")


def test_a_saved_folder_is_of_one_subset(tmp_path: Path, pairs: datasets.Dataset) -> None:
    pairs.save_to_disk(tmp_path / "saved")
    assert read(str(tmp_path / "saved"), subset="de-en", streaming=True) == read(str(tmp_path / "saved"))
    pairs.info.config_name = "fr-en"
    pairs.save_to_disk(tmp_path / "french")
    assert read(str(tmp_path / "french"), subset="fr-en") == read(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="french was saved from the subset 'fr-en', and not from 'de-en'"):
        read(str(tmp_path / "french"), subset="de-en")


def test_a_view_of_rows_is_read_as_it_stands(tmp_path: Path, pairs: datasets.Dataset) -> None:
    pairs.select([5, 1]).save_to_disk(str(tmp_path / "saved"))
    assert [cells for _, cells in read(str(tmp_path / "saved"))] == [ROWS[5][1], ROWS[1][1]]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_set_of_the_hub_is_asked_for_as_the_corpus_says(
    monkeypatch: pytest.MonkeyPatch, pairs: datasets.Dataset, streaming: bool
) -> None:
    asked = []

    def load_dataset(*given: Any, **options: Any) -> Any:
        asked.append((given, options))
        return pairs.to_iterable_dataset(num_shards=3) if options["streaming"] else pairs

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("wmt14", "test", "de-en", streaming=streaming) == ROWS
    assert asked == [(("wmt14", "de-en"), {"split": "test", "streaming": streaming})]


def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*given: Any, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach 'wmt14'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"wmt14, subset de-en, split train: cannot load it \(Couldn't") as raised:
        read("wmt14", subset="de-en")
    assert "\n" not in str(raised.value)


def test_a_network_that_fails_on_the_way_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Any:
        yield PAIRS[0]
        raise ConnectionError("gone")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    with pytest.raises(DataError, match=r"data set wmt14 train: reading failed \(.*gone"):
        read("wmt14", streaming=True)


def test_a_folder_that_holds_no_data_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder that datasets\.save_to_disk did not write"):
        read(str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match="cannot read the saved data set"):
        read(str(tmp_path))


def test_an_unknown_column_is_named_with_those_there_are(tmp_path: Path, pairs: datasets.Dataset) -> None:
    pairs.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"no column fr; there is translation\.de, translation\.en, id"):
        list(dataset_rows(str(tmp_path / "saved"), None, "train", ["fr"], Repairs(), streaming=False))


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
