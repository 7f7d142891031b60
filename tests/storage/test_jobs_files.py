"""The files of a job: those that mtkit did not write stay, and each output appears when it is complete."""

import gzip
import os
import resource
from pathlib import Path

import pytest

from mtkit.errors import MtkitError
from tests.storage.test_jobs import KilledError, Worker, expected, items, run, write


@pytest.mark.parametrize("name", ["out.txt.partial", "out.txt.partial.jsonl", "out.txt.partial.lock"])
@pytest.mark.parametrize("kind", ["text", "link", "folder", "pipe"])
def test_what_mtkit_did_not_write_stays(tmp_path: Path, name: str, kind: str) -> None:
    out, kept = tmp_path / "deep" / "out.txt", tmp_path / "kept"
    theirs = out.with_name(name)
    theirs.parent.mkdir()
    kept.write_text("years of work\n")
    if kind == "text":
        theirs.write_text("years of work\n")
    elif kind == "link":
        theirs.symlink_to(kept)
    elif kind == "folder":
        theirs.mkdir()
    else:
        os.mkfifo(theirs)
    with pytest.raises(MtkitError, match=f"{name} .*(move it away|remove it)$"):
        run(out, items(3), Worker())
    assert [each.name for each in out.parent.iterdir()] == [name]
    assert kept.read_text() == "years of work\n"
    assert kind != "text" or theirs.read_text() == "years of work\n"


@pytest.mark.parametrize("record", ["words\n", '{"theirs": 1}\n', "{", "[" * 100_000 + "\n"], ids=range(4))
def test_an_unfinished_output_with_a_record_that_is_not_ours_stays(tmp_path: Path, record: str) -> None:
    out, files = tmp_path / "out.txt", {"out.txt.partial": "years of work\n", "out.txt.partial.jsonl": record}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(MtkitError, match=r"partial exists without a record of mtkit in .*jsonl; move it away$"):
        run(out, items(3), Worker())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("count", [0, 47])
def test_a_name_that_ends_in_gz_gets_a_gzip_file(tmp_path: Path, count: int) -> None:
    out = tmp_path / "out.gz"
    if count:
        with pytest.raises(KilledError):
            run(out, items(count), Worker(25))
        assert not out.exists()
    _, skipped = run(out, items(count), Worker())
    assert skipped == (20 if count else 0)
    with gzip.open(out) as file:
        assert file.read() == expected(items(count))
    assert out.stat().st_size > 0


def test_a_file_that_may_not_grow_leaves_nothing_behind(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(MtkitError, match=r"cannot write .*ulimit -f"):
            run(tmp_path / "out", items(3), Worker())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_the_first_output_appears_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees the first output may rely on the others, also after a kill between their renames."""
    out, other, given = tmp_path / "out.txt", tmp_path / "links.txt", items(15)
    replace, renamed = Path.replace, list[Path]()

    def kill_at_the_second(self: Path, target: Path) -> Path:
        if target in (out, other):
            if renamed:
                raise KilledError
            renamed.append(target)
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", kill_at_the_second)
        with pytest.raises(KilledError):
            write(given, Worker(outputs=2), [out, other])
    assert renamed == [other]
    assert not out.exists()
    write(given, Worker(outputs=2), [out, other])
    assert out.read_bytes() == expected(given)
    assert len(other.read_bytes().splitlines()) == 15
