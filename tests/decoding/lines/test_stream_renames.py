"""The order in which several outputs get their names."""

from pathlib import Path

import pytest

from mtkit.decoding.lines.stream import to_file
from tests.decoding.lines.test_stream import KilledError, Worker, expected, items


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

    def write() -> None:
        nobody = list[object]().append
        to_file(iter(given), Worker(outputs=2), [out, other], {}, say=nobody, on_skip=nobody)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", kill_at_the_second)
        with pytest.raises(KilledError):
            write()
    assert renamed == [other]
    assert not out.exists()
    write()
    assert out.read_bytes() == expected(given)
    assert len(other.read_bytes().splitlines()) == 15
