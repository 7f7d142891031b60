"""JSON files: types, errors in one line, and numpy's values."""

import gzip
import os
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import pytest
from typing_extensions import TypedDict

from mtkit.errors import MtkitError, RunError
from mtkit.storage import records
from mtkit.storage.records import Count, as_python, read_object, read_stored, read_stored_lines, stored
from tests.damage import check_damages


class Inner(TypedDict):
    names: list[str]


@stored
class Content(TypedDict):
    format: int
    update: Count
    loss: float
    inner: NotRequired[Inner]


WHOLE = '{"format": 2, "update": 3, "loss": 1, "inner": {"names": ["a"]}, "more": [1]}'


def read(path: Path) -> Content:
    return read_stored(path, Content, "train again", error=RunError, version=2)


def test_types_are_not_bent_and_other_keys_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(WHOLE)
    assert read(path) == {"format": 2, "update": 3, "loss": 1.0, "inner": {"names": ["a"]}, "more": [1]}
    assert check_damages(path, lambda: read(path)) > 40


def test_a_type_is_analysed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text(WHOLE)
    read(path)
    monkeypatch.delattr("pydantic.TypeAdapter.__init__")
    read(path)
    assert list(read_stored_lines(path, Content, "train again"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (WHOLE.replace("3", '"3"'), [r"update = '3'", "valid integer", "train again"]),
        (WHOLE.replace('["a"]', "[5]"), [r"inner.names.0 = 5"]),
        (WHOLE.replace('"update": 3, ', ""), ["update is missing"]),
        (WHOLE.replace("3", "-3"), ["update = -3", "greater than or equal to 0"]),
        ('{"format": 3, "mtkit": "9.9"}', ["has format 3, as mtkit '9.9' writes it", "reads format 2"]),
        ('{"format": 3, "mtkit": "\\u001b[2J"}', [r"as mtkit '\x1b[2J' writes it"]),
        ("[]", ["[]: should be an object"]),
        ("{", ["Invalid JSON"]),
    ],
)
def test_the_fault_is_named(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(RunError) as raised:
        read(path)
    for word in [str(path), *words]:
        assert word in str(raised.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(RunError, match=rf"cannot read {path}.*train again"):
            read(path)


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1', "[" * 200_000, "\xff"])
def test_an_object_that_cannot_be_read_is_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    assert read_object(path) == {}
    path.write_text('{"a": [1.5]}')
    assert read_object(path) == {"a": [1.5]}
    path.write_bytes(content.encode("latin-1"))
    assert read_object(path) == {}


def test_a_device_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.symlink_to("/dev/zero")
    assert read_object(path) == {}
    with pytest.raises(RunError, match=r"cannot read .*it is a pipe or a device; train again"):
        read(path)


def test_only_the_last_line_may_be_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def lines() -> list[Content]:
        return list(read_stored_lines(path, Content, "take the line out"))

    path.write_text(f"{WHOLE}\n{WHOLE}\n{WHOLE[:20]}")
    assert len(lines()) == 2
    path.write_text("")
    assert lines() == []
    path.write_text(f"\n{WHOLE}\n\n \r\n{WHOLE}\n")
    assert len(lines()) == 2
    path.write_text(f"{WHOLE}\n{WHOLE[:20]}\n{WHOLE}\n")
    with pytest.raises(Exception, match=rf"{path}, line 2, is damaged .*take the line out"):
        lines()


def test_gzipped_lines_are_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"

    def lines() -> list[Content]:
        return list(read_stored_lines(path, Content, "fetch it again"))

    packed = gzip.compress(f"{WHOLE}\n{WHOLE}\n".encode())
    path.write_bytes(packed)
    assert len(lines()) == 2
    for damaged in (b"no gzip", packed[:-9], packed[:12] + b"\xff" * 20):
        path.write_bytes(damaged)
        with pytest.raises(MtkitError, match=r"cannot read .*a\.jsonl\.gz: .*; fetch it again$"):
            lines()
    path.write_bytes(gzip.compress(b" " * 1001))
    monkeypatch.setattr(records, "LARGEST_LINES", 1000)
    with pytest.raises(MtkitError, match=r"a\.jsonl\.gz: File too large; fetch it again$"):
        lines()


def test_a_file_that_is_too_large_for_a_record_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(WHOLE)
    os.truncate(path, 1 << 40)
    for use in (lambda: read(path), lambda: list(read_stored_lines(path, Content, "train again", error=RunError))):
        with pytest.raises(RunError, match=r"cannot read .*a\.json: File too large; train again$"):
            use()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.int64(5), 5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        ([np.int8(1), 2], [1, 2]),
        ((np.int8(1), 2), (1, 2)),
        ({"positions": {"name": "relative", "clip": np.uint16(3)}}, {"positions": {"name": "relative", "clip": 3}}),
        ("band", "band"),
        (None, None),
        (True, True),
    ],
)
def test_values_are_pythons_own(value: Any, wanted: Any) -> None:
    found = as_python(value)
    assert repr(found) == repr(wanted)  # 1 == np.int8(1) == True
