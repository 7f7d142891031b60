"""Files appear whole or not at all."""

import ast
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from mtkit.errors import MtkitError
from mtkit.files import check_writable, json_text, write_json, write_tensors, write_text, writing


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


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    content = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], "c": {"d": 2, 3: "NaN"}, "path": tmp_path}
    wanted = {"a": [1.5, None, [None, {"b": None}]], "c": {"d": 2, "3": "NaN"}, "path": str(tmp_path)}
    assert json.loads(json_text(content), parse_constant=refuse) == wanted
    write_json(tmp_path / "a.json", content)
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse) == wanted


def test_json_is_written_in_one_place() -> None:
    package = Path(__file__).parent.parent / "mtkit"
    writers = {
        str(module.relative_to(package))
        for module in package.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.dump", "json.dumps")
    }
    assert writers == {"files.py"}


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_tensors_may_be_read_by_those_who_may_read_other_files(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "other").write_text("")
        write_tensors(tmp_path / "tensors", {"a": torch.zeros(2)})
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("other", "tensors")] == [0o666 & ~umask] * 2


def test_tensors_are_written_in_one_place() -> None:
    package = Path(__file__).parent.parent / "mtkit"
    assert [each.name for each in package.rglob("*.py") if "save_file" in each.read_text(encoding="utf-8")] == [
        "files.py"
    ]


def test_a_reader_that_has_left_is_no_fault_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), writing(tmp_path / "file"):
        raise BrokenPipeError
    assert not list(tmp_path.iterdir())


def _killed_while_writing(path: Path, begin: str) -> None:
    """What a process leaves that is killed inside `writing`."""
    lines = f"""
        import os, signal
        from pathlib import Path
        from mtkit import files

        path = Path({str(path)!r})
        with files.writing(path) as temporary:
            {begin}
            os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", dedent(lines)], check=False)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    """Whatever its process number: in a container all are 1."""
    _killed_while_writing(tmp_path / "file.txt", "temporary.write_text('half')")
    _killed_while_writing(tmp_path / "folder", "temporary.mkdir()")
    assert len(list(tmp_path.iterdir())) == 2
    for name in ("file.txt", "folder"):
        with writing(tmp_path / name) as temporary:
            temporary.write_text("whole") if name == "file.txt" else temporary.mkdir()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file.txt", "folder"]


def test_a_folder_that_was_being_replaced_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "old").mkdir(parents=True)
    _killed_while_writing(folder, "temporary.mkdir(); path.rename(temporary.with_name('folder.replaced'))")
    assert not folder.exists()
    with pytest.raises(KeyError), writing(folder):
        raise KeyError
    assert list(folder.iterdir()) == [folder / "old"]
    assert list(tmp_path.iterdir()) == [folder]


def test_what_others_are_writing_and_have_written_stays(tmp_path: Path) -> None:
    """The same path twice at once, and names that begin alike."""
    beside = [tmp_path / ".data.v2.notes.tmp", tmp_path / ".data.12.tmp"]
    for each in beside:
        each.mkdir()
    with writing(tmp_path / "data") as one:
        one.write_text("one")
        with writing(tmp_path / "data") as two:
            two.write_text("two")
        assert (tmp_path / "data").read_text() == "two"
    assert (tmp_path / "data").read_text() == "one"
    assert sorted(tmp_path.iterdir()) == sorted([*beside, tmp_path / "data"])


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with writing(tmp_path / "link") as temporary:
        temporary.mkdir()
        (temporary / "new").touch()
    assert (tmp_path / "link").is_symlink()
    assert list((tmp_path / "disk").iterdir()) == [tmp_path / "disk" / "new"]


def test_a_place_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder" / "file.txt")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"
    with pytest.raises(MtkitError, match=r"cannot write .*Not a directory; choose another place"):
        check_writable(tmp_path / "file" / "out.txt")
    with pytest.raises(MtkitError, match="is a folder; give the name of a file"):
        check_writable(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(MtkitError, match=r"is a folder; give the name of a file to write"), writing(tmp_path) as file:
        file.write_text("words")
    assert list(tmp_path.iterdir()) == []
