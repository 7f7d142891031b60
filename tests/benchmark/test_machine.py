from pathlib import Path

import pytest

from mtkit.benchmark.machine import busy_note


@pytest.mark.parametrize(
    ("running", "threads", "said"),
    [
        (1, 2, None),
        (4, 2, "other processes keep 3 of 4 cores busy, and this one uses 2"),
        (3, 3, "2 of 4"),
        (2, 3, None),
    ],
)
def test_other_work_is_noticed(running: int, threads: int, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: f"9.00 9.00 9.00 {running}/500 12345\n")
    message = busy_note(threads, seconds=0.0)
    assert (message is None) == (said is None)
    assert said is None or said in str(message)


def test_elsewhere_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, encoding: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert busy_note(10**6, seconds=0.0) is None
