"""Files appear whole or not at all."""

import errno
from pathlib import Path

import pytest

from mtkit.errors import MtkitError
from mtkit.files import write_json, write_text, writing


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError), writing(path) as temporary:
        temporary.write_text("half\ud800", encoding="utf-8")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for content in ("one", "two"):
        with writing(folder) as temporary:
            temporary.mkdir()
            (temporary / content).write_text(content)
    assert [each.name for each in folder.iterdir()] == ["two"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MtkitError, match=r"cannot write .*file\.json.*No space left"), writing(tmp_path / "file.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_json_keeps_text_readable(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"text": "über"})
    assert "über" in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    gone = 2**22 + 1  # above the largest process number
    (tmp_path / f".file.txt.{gone}.tmp").write_text("half")
    (tmp_path / f".folder.{gone}.tmp").mkdir()
    (tmp_path / f".moved.{gone}.old").mkdir()
    for name in ("file.txt", "folder", "moved"):
        with writing(tmp_path / name) as temporary:
            temporary.write_text("whole") if name == "file.txt" else temporary.mkdir()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file.txt", "folder", "moved"]
