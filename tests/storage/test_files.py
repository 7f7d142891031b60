"""Files appear whole or not at all."""

import ast
import errno
import gzip
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from filelock import FileLock

from mtkit.errors import MtkitError
from mtkit.storage import files
from mtkit.storage.files import (
    WriteError,
    check_regular,
    check_writable,
    digest,
    inside,
    is_device,
    is_leftover,
    json_text,
    locked,
    write_json,
    write_tensors,
    write_text,
    writing,
)


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


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")
    path.chmod(0o640)
    write_text(path, "new")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MtkitError, match=r"cannot write .*file\.json.*No space left"), writing(tmp_path / "file.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_folder_of_the_user_not_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(MtkitError) as raised, writing(tmp_path / "folder") as temporary:
        write_text(temporary / "README.md", "text")
    assert str(raised.value).startswith(f"cannot write {tmp_path / 'folder'}: No space left on device; free some space")
    with pytest.raises(MtkitError, match=r"cannot write .*other\.txt"), writing(tmp_path / "folder"):
        write_text(tmp_path / "other.txt", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_too_long_is_said(tmp_path: Path) -> None:
    with pytest.raises(MtkitError, match=r"cannot write .*: File name too long; give a shorter name"):
        write_text(tmp_path / ("x" * 250), "text")


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("gone")
    with pytest.raises(FileExistsError) as raised:
        (tmp_path / "run").mkdir(exist_ok=True)
    message = str(WriteError([tmp_path / "run" / "recipe.yaml"], raised.value))
    assert message.endswith(f"{tmp_path / 'run'} is a link to gone, which does not exist; choose another place")


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
    package = Path(__file__).parents[2] / "mtkit"
    writers = {
        str(module.relative_to(package))
        for module in package.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.dump", "json.dumps")
    }
    assert writers == {"storage/files.py"}


def test_json_of_files_is_parsed_without_recursion() -> None:
    package = Path(__file__).parents[2] / "mtkit"
    parsed = {
        ast.unparse(node)
        for module in package.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.load", "json.loads")
    }
    own = ("json.loads(json_text(", "json.loads(recipe.model_dump_json(", "json.loads(bytes(part[")
    for caught in ("json.loads(line)", "json.loads(body)"):  # tables and requests, which catch RecursionError
        parsed.remove(caught)
    assert [call for call in parsed if not call.startswith(own)] == []


def test_a_folder_with_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").touch()
    (tmp_path / "link").symlink_to("deep/file")
    (tmp_path / "broken").symlink_to("none")
    check_regular(tmp_path)
    os.mkfifo(tmp_path / "deep" / "pipe")
    with pytest.raises(MtkitError, match=r"deep/pipe is a pipe or a device, not a file; remove it"):
        check_regular(tmp_path)


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
    package = Path(__file__).parents[2] / "mtkit"
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
        from mtkit.storage import files

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


def test_a_leftover_loses_its_lock_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, left = tmp_path / "file.txt", tmp_path / f".file.txt.{'0' * 16}.tmp"
    (left / "folder").mkdir(parents=True)
    for name in ("file.txt", "file.txt.lock", "folder/file"):
        (left / name).touch()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda folder, **_: None)
        files.remove_leftover(left, path)
    assert is_leftover(left, path)
    assert not (left / "file.txt").exists()
    files.remove_leftover(left, path)
    assert not left.exists()


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


@pytest.mark.parametrize("error", [FileNotFoundError, FileExistsError])
def test_a_temporary_folder_may_go_while_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """filelock makes a missing folder, which fails with the second error if it comes and goes meanwhile."""
    left = tmp_path / f".file.txt.{'0' * 16}.tmp"
    left.mkdir()
    acquired, errors = files._acquired, [error(), error()]

    def racing(lock: FileLock, *arguments: Any, **options: Any) -> bool:
        if errors:
            shutil.rmtree(Path(lock.lock_file).parent)
            raise errors.pop()
        return acquired(lock, *arguments, **options)

    monkeypatch.setattr(files, "_acquired", racing)
    write_text(tmp_path / "file.txt", "words")
    assert not errors
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


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
    for path in (tmp_path / "file" / "out.txt", tmp_path / "file" / "folder" / "out.txt"):
        with pytest.raises(MtkitError, match=r"cannot write .*out.txt: .*/file is a file, not a folder; choose"):
            check_writable(path)
    with pytest.raises(MtkitError, match="is a folder; give the name of a file"):
        check_writable(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(MtkitError, match=r"is a folder; give the name of a file to write"), writing(tmp_path) as file:
        file.write_text("words")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_content_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, flushed = tmp_path / "new", list[tuple[int, bool]]()

    def fsync(handle: int) -> None:
        flushed.append((os.fstat(handle).st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with writing(path) as temporary:
        file = temporary / "below" / "file" if kind == "folder" else temporary
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("words")
    written = path / "below" / "file" if kind == "folder" else path
    assert flushed == [(written.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_paths_inside_a_folder_lead_over_no_link(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "named").symlink_to(tmp_path / "real")
    assert inside(tmp_path / "named", "deep", "file.txt") == tmp_path / "named" / "deep" / "file.txt"
    (tmp_path / "real" / "deep" / "file.txt").symlink_to(tmp_path / "home" / "none")
    (tmp_path / "real" / "away").symlink_to(tmp_path / "home")
    for names in (("deep", "file.txt"), ("away",), ("away", "file.txt")):
        with pytest.raises(MtkitError, match=rf"named/{names[0]}.* is a link, and mtkit writes only real files"):
            inside(tmp_path / "named", *names)


@pytest.mark.parametrize("name", ["", "..", "../home", "/etc/passwd", "a/b"])
def test_a_name_inside_a_folder_is_one_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(MtkitError, match="is not a file name"):
        inside(tmp_path, name)


def test_a_lock_that_is_a_file_of_the_user_stays(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("words")
    with pytest.raises(MtkitError, match="is not a lock of mtkit"), locked(tmp_path / "lock", "held"):
        pass
    assert (tmp_path / "lock").read_text() == "words"


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_folder_that_no_process_of_mtkit_left_stays(tmp_path: Path, kind: str) -> None:
    theirs, named = tmp_path / "theirs", tmp_path / ".file.txt.0123456789abcdef.tmp"
    theirs.mkdir()
    (theirs / "words").write_text("words")
    (theirs / "file.txt.replaced").write_text("old")
    if kind == "link":
        named.symlink_to(theirs)
    else:
        theirs.rename(named)
    write_text(tmp_path / "file.txt", "new")
    assert sorted(each.name for each in named.iterdir()) == ["file.txt.replaced", "words"]


def test_a_device_gets_the_content_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "words")
    assert os.read(reading, 100) == b"words"
    os.close(reading)
    assert (tmp_path / "pipe").is_fifo()


def test_the_file_behind_a_stream_is_continued(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        log.write("before\n")
        log.flush()
        write_text(Path(f"/dev/fd/{log.fileno()}"), "text\n")
        log.write("after\n")
    assert (tmp_path / "log").read_text() == "before\ntext\nafter\n"
    assert is_device(Path("/dev/stdout"))
    assert not is_device(Path("/dev/fd"))


def test_text_with_a_name_that_ends_in_gz_is_packed(tmp_path: Path) -> None:
    write_text(tmp_path / "page.html.gz", "words\n")
    assert gzip.decompress((tmp_path / "page.html.gz").read_bytes()) == b"words\n"


def test_a_digest_is_read_again_if_the_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "file", []
    read = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: reads.append(1) or read(*given))
    path.write_bytes(b"one")
    assert [digest(path), digest(path)] == [hashlib.sha256(b"one").hexdigest()] * 2
    assert len(reads) == 2  # a change at the same moment would have the same time
    monkeypatch.setattr(files, "SETTLED", -1.0)
    assert [digest(path), digest(path)] == [hashlib.sha256(b"one").hexdigest()] * 2
    assert len(reads) == 3
    path.write_bytes(b"two")
    os.utime(path, ns=(0, 0))
    assert digest(path) == hashlib.sha256(b"two").hexdigest()
