import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mtkit.data.columns import Mapped
from mtkit.data.prepare import Report, prepare
from mtkit.data.prepared import Prepared, _all_below, open_prepared
from mtkit.data.report import summary
from mtkit.decoding.lines.source import source_budget
from mtkit.errors import DataError
from mtkit.recipe.data import DataSettings
from mtkit.text.text_files import Lines
from mtkit.text.tokenizer import BOS, EOS, PAD, Tokenizers
from tests.damage import check_damages


def test_tokens_are_those_of_the_text(builtin: Prepared) -> None:
    for name, side in (("train", builtin.train), ("valid", builtin.valid), ("test", builtin.test)):
        assert side is not None
        for tokens, tokenizer, language in (
            (side.source, builtin.tokenizers.source, "en"),
            (side.target, builtin.tokenizers.target, "de"),
        ):
            texts = list(Lines(builtin.folder / "text" / f"{name}.{language}"))
            assert [row.tolist() for row in (tokens[index] for index in range(len(side)))] == [
                tokenizer.encode(text) for text in texts
            ]
        assert side.lines.tolist() == list(range(1, len(side) + 1))


def test_many_record_batches_read_as_one(builtin: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.data.chunks._PAIRS", 7)
    settings = builtin.settings.model_copy(update={"folder": tmp_path / "data"})
    prepare(settings)
    other = open_prepared(tmp_path / "data")
    rows = np.arange(len(builtin.train))
    assert len(other.train) == len(rows)
    for name in ("source", "target"):
        one, two = getattr(builtin.train, name), getattr(other.train, name)
        width = int(one.lengths.max())
        np.testing.assert_array_equal(one.pad(rows, width, None, None), two.pad(rows, width, None, None))
    assert other.test is not None
    assert builtin.test is not None
    assert list(other.test.source_text or ()) == list(builtin.test.source_text or ())


def test_padded_rows_are_the_rows_with_marks_and_padding(builtin: Prepared) -> None:
    tokens, rows = builtin.train.target, np.array([5, 0, 5, len(builtin.train) - 1])
    width = int(tokens.lengths[rows].max()) + 3
    for first, last in ((None, None), (BOS, None), (None, EOS), (BOS, EOS)):
        expected = []
        for row in rows:
            real = [first] * (first is not None) + tokens[row].tolist() + [last] * (last is not None)
            expected.append(real + [PAD] * (width - len(real)))
        padded = tokens.pad(rows, width, first, last)
        assert padded.dtype == np.int64
        assert padded.tolist() == expected


def test_raw_text_is_kept_and_cut_like_a_list(builtin: Prepared) -> None:
    texts = builtin.valid.target_text
    assert texts is not None
    written = list(Lines(builtin.folder / "text" / "valid.de"))
    assert list(texts) == written
    assert (texts[3], texts[-1], texts[2:5]) == (written[3], written[-1], written[2:5])
    assert builtin.train.source_text is None


def test_too_long_counts_the_end_mark(builtin: Prepared) -> None:
    longest = int(max(builtin.train.source.lengths.max(), builtin.train.target.lengths.max()))
    assert builtin.train.too_long(longest + 1) == 0
    assert builtin.train.too_long(longest) > 0


def test_a_moved_folder_opens(builtin: Prepared, tmp_path: Path) -> None:
    shutil.copytree(builtin.folder, tmp_path / "moved")
    moved = open_prepared(tmp_path / "moved")
    assert moved.fingerprint == builtin.fingerprint
    assert moved.settings.folder == tmp_path / "moved"
    assert moved.settings.builtin == builtin.settings.builtin


def test_reading_imports_neither_datasets_nor_pandas(builtin: Prepared) -> None:
    code = "import sys; from pathlib import Path; from mtkit.data.prepared import open_prepared; "
    code += "open_prepared(Path(sys.argv[1])).train.source[0]; sys.exit(bool({'datasets', 'pandas'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code, str(builtin.folder)], check=True)


def _cut(folder: Path) -> None:
    content = (folder / "train.arrow").read_bytes()
    (folder / "train.arrow").write_bytes(content[: len(content) // 2])


def _older(folder: Path) -> None:
    record = json.loads((folder / "prepared.json").read_text())
    (folder / "prepared.json").write_text(json.dumps({**record, "format": 0}))


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _older,
        lambda folder: (folder / "train.arrow").write_bytes(b""),
        lambda folder: (folder / "valid.arrow").unlink(),
        lambda folder: shutil.copy(folder / "valid.arrow", folder / "train.arrow"),
        lambda folder: (folder / "prepared.json").write_text("{"),
        lambda folder: (folder / "prepared.json").write_text('{"format": 1}'),
        lambda folder: (folder / "prepared.json").unlink(),
    ],
)
def test_damaged_data_is_one_line_that_says_what_to_do(
    builtin: Prepared, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(builtin.folder, folder)
    damage(folder)
    with pytest.raises(DataError, match="mtkit prepare") as caught:
        open_prepared(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_damaged_record_is_named(builtin: Prepared, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(builtin.folder, folder)

    def use() -> None:
        opened = open_prepared(folder)
        assert summary(Report(folder, unchanged=True, record=opened.record), 100)
        source_budget(opened)

    alike = {"valid", "test", "words", "pieces", "unknown", "bytes", "longest", "settings"}
    assert check_damages(folder / "prepared.json", use, names=folder, whole_keys=alike) > 150
    record = json.loads((folder / "prepared.json").read_text())
    (folder / "prepared.json").write_text(json.dumps({**record, "settings": {"tokenizer": {"kind": "word"}}}))
    with pytest.raises(DataError, match=r"prepared\.json is damaged .*tokenizer\.kind = 'word'"):
        use()


def _written(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    with pa.OSFile(str(path), "rb") as file:
        table = change(pa.ipc.open_stream(file).read_all())
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def _with(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.names.index(name), name, column)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.drop_columns("line"), "other columns"),
        (lambda table: _with(table, "line", pa.array(["x"] * len(table))), "other columns"),
        (lambda table: _with(table, "source", table["source"].cast(pa.list_(pa.int64()))), "other columns"),
        (lambda table: _with(table, "line", pa.nulls(len(table), pa.int64())), "empty cells"),
        (lambda table: table.append_column("task", pa.array([7] * len(table), pa.int16())), "direction"),
        (lambda table: table.slice(0, 0), "rows"),
    ],
)
def test_other_columns_are_refused(
    builtin: Prepared, tmp_path: Path, change: Callable[[pa.Table], pa.Table], words: str
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(builtin.folder, folder)
    _written(folder / "train.arrow", change)
    with pytest.raises(DataError, match=rf"damaged \(.*{words}.*mtkit prepare"):
        open_prepared(folder)


@pytest.mark.parametrize("wrong", [None, 2, -1])
def test_numbers_of_a_mapped_column_are_checked_in_little_memory(wrong: int | None) -> None:
    rows = 5 << 20
    values = np.ones(rows, dtype=np.int16)
    if wrong is not None:
        values[-1] = wrong
    column = Mapped(values, [0], [rows])
    tracemalloc.start()
    try:
        assert _all_below(column, 2) == (wrong is None)
        assert tracemalloc.get_traced_memory()[1] < 16 * rows
    finally:
        tracemalloc.stop()
    assert _all_below(values[:0], 2)


@pytest.mark.parametrize("piece", [-1, 600_000])
def test_pieces_beyond_the_vocabulary_are_refused(builtin: Prepared, tmp_path: Path, piece: int) -> None:
    folder = tmp_path / "data"
    shutil.copytree(builtin.folder, folder)
    wrong = [[5, piece]] * len(builtin.train)
    _written(folder / "train.arrow", lambda table: _with(table, "source", pa.array(wrong, pa.list_(pa.int32()))))
    train = open_prepared(folder).train
    assert train.target.pad(np.arange(1), 200, BOS, EOS).any()
    with pytest.raises(DataError, match=f"damaged .*piece {piece}"):
        train.source.pad(np.arange(1), 200, None, EOS)
    with pytest.raises(DataError, match=f"damaged .*piece {piece}"):
        train.source.take(np.arange(1))


def test_the_tokenizer_of_other_data_is_refused(builtin: Prepared, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    given = {"folder": folder, "builtin": {"train": 60, "valid": 4, "test": 4}, "tokenizer": {"vocabulary": 400}}
    prepare(DataSettings.model_validate(given))
    shutil.copytree(builtin.folder / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    assert Tokenizers.load(folder / "tokenizer").source.size == 600
    with pytest.raises(DataError, match=r"tokenizer in .* is not the one"):
        assert open_prepared(folder).tokenizers


@pytest.mark.parametrize(("name", "content"), [("joint", b"cut"), ("joint", None), ("folding", b""), ("folding", None)])
def test_a_damaged_tokenizer_is_replaced_by_the_command_that_is_named(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    settings = DataSettings.model_validate(
        {"folder": tmp_path / "data", "builtin": {"train": 60, "valid": 4, "test": 4}, "tokenizer": {"vocabulary": 400}}
    )
    prepare(settings)
    file = tmp_path / "data" / "tokenizer" / f"{name}.model"
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"repeat the `mtkit prepare` that made it, with --overwrite"):
        assert open_prepared(settings.folder).tokenizers
    with pytest.raises(DataError, match=r"repeat the `mtkit prepare` that made it, with --overwrite"):
        prepare(settings)  # it would say that the data exists
    prepare(settings, overwrite=True)
    assert file.read_bytes() == whole


def test_a_missing_folder_says_to_prepare(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"run `mtkit prepare` first, with the same --recipe, or with --data .*none and your text"
    ):
        open_prepared(tmp_path / "none")
    assert DataSettings().folder == Path("mtkit-data")


_READ_AFTER = """
import os, sys
from pathlib import Path
import numpy as np
from mtkit.data.prepared import open_prepared
from mtkit.errors import DataError

folder, how = Path(sys.argv[1]), sys.argv[2]
prepared = open_prepared(folder)
train, valid, rows = prepared.train, prepared.valid, np.arange(5)
for path in folder.glob("*.arrow"):
    if how == "emptied":
        path.write_bytes(b"")
    elif how == "overwritten":
        path.write_bytes(bytes(path.stat().st_size))
    elif how == "removed":
        path.unlink()
    else:
        path.with_suffix(".new").write_bytes(b"new")
        path.with_suffix(".new").replace(path)
reads = {
    "line": lambda: train.lines[rows],
    "take": lambda: train.source.take(rows),
    "pad": lambda: train.target.pad(rows, 99, None, None),
    "spans": lambda: train.source.spans(rows, rows)[0],
    "row": lambda: train.source[0],
    "text": lambda: valid.source_text[0],
    "texts": lambda: list(valid.target_text),
}
for name, read in reads.items():
    try:
        read()
        print(name, "is read")
    except DataError as error:
        print(name, error)
"""


@pytest.mark.parametrize("how", ["emptied", "overwritten", "removed", "replaced"])
def test_a_file_that_is_changed_in_place_is_not_read(builtin: Prepared, tmp_path: Path, how: str) -> None:
    """To read behind the end of a mapped file kills the process; one that is removed or replaced stays readable."""
    shutil.copytree(builtin.folder, tmp_path / "data")
    command = [sys.executable, "-c", _READ_AFTER, str(tmp_path / "data"), how]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    assert (ended.returncode, len(lines)) == (0, 7), ended.stderr
    wanted = ".arrow was changed while it was in use; repeat" if how in ("emptied", "overwritten") else " is read"
    assert [line for line in lines if wanted not in line] == []


def test_lengths_have_room_for_the_end_mark(builtin: Prepared, tmp_path: Path) -> None:
    folder, most = tmp_path / "data", np.iinfo(np.uint16).max
    shutil.copytree(builtin.folder, folder)
    rows = pa.array([[5] * most] + [[5]] * (len(builtin.train) - 1), pa.list_(pa.int32()))
    _written(folder / "train.arrow", lambda table: _with(table, "source", rows))
    lengths = open_prepared(folder).train.source.lengths
    assert (lengths[:2] + 1).tolist() == [most + 1, 2]
