import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from mtkit.experiments import compare as comparing
from mtkit.experiments.compare import compare
from mtkit.experiments.folder import Folder
from mtkit.recipe import Recipe
from tests.experiments.results import result

Tiny = Callable[..., Recipe]
Opened = Callable[..., Folder]


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "LOOK_SECONDS", 0.02)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_one_that_fails_does_not_lose_the_others(tiny: Tiny, opened: Opened) -> None:
    folder = opened(tiny(attention={"options": {"local_heads": 5}}), "routing", "full")
    shown: list[str] = []
    done: list[str] = []
    assert compare(folder, ["routing", "full"], show=shown.append, done=done.append) is None
    assert done == ["routing", "full"]
    found = folder.results()
    assert [each["attention"] for each in found] == ["full", "routing"]
    assert "local_heads" in found[1]["failed"]
    assert "\n" not in found[1]["failed"]
    assert any(line.startswith(f"[2/2] full ({folder.log('full')}): training") for line in shown)
    assert any(line.startswith("[2/2] full: training, update 2/2") or line.endswith("decoding") for line in shown)


def test_what_is_done_is_not_done_again_and_a_failure_is_tried_again(
    tiny: Tiny, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tiny(), "full", "band", "linear")
    folder.keep("full", **{key: value for key, value in result("full", 5.0).items() if key != "attention"})
    folder.fail("band", "for some reason")
    asked: list[str] = []

    def record(children: object, folder: Folder, name: str, show: object, *, title: str) -> int:
        asked.append(name)
        assert folder.result(name) is None
        return -signal.SIGKILL

    monkeypatch.setattr(comparing.Children, "run", record)
    compare(folder, ["full", "band", "linear"], show=lambda line: None, done=lambda name: None)
    assert asked == ["band", "linear"]
    assert "SIGKILL, perhaps out of memory" in (folder.result("linear") or {})["failed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_the_child_which_saves_and_leaves(tiny: Tiny, opened: Opened, number: signal.Signals) -> None:
    folder = opened(tiny(training={"max_updates": 100_000, "validate_every": 100_000}), "full", "band")
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    sent: list[str] = []

    def show(line: str) -> None:
        if "update" in line and not sent:
            sent.append(line)
            os.kill(os.getpid(), number)

    assert compare(folder, ["full", "band"], show=show, done=lambda name: None) == number
    assert sent
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    assert folder.results() == []
    assert not folder.log("band").exists()
    assert len(list((folder.run("full") / "checkpoints").glob("update-*"))) == 1
    assert _nobody_works_on(folder.log("full"))


def test_a_signal_before_the_child_listens_stops_it_too(tiny: Tiny, opened: Opened) -> None:
    folder = opened(tiny(training={"max_updates": 100_000}), "full")
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    begin = time.monotonic()
    assert compare(folder, ["full"], show=lambda line: None, done=lambda name: None) == signal.SIGTERM
    assert time.monotonic() - begin < 60
    assert folder.result("full") is None


def _nobody_works_on(log: Path) -> bool:
    """A process holds the lock of its log as long as it lives."""
    try:
        with FileLock(log.with_suffix(".lock"), blocking=False):
            return True
    except Timeout:
        return False


def test_no_code_of_the_current_folder_is_run(
    tiny: Tiny, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tiny(), "full")
    here = tmp_path / "here"
    here.mkdir()
    (here / "torch.py").write_text("open('ran', 'w'); raise SystemExit(3)")
    monkeypatch.chdir(here)
    # a mechanism that the comparison does not have ends the process after its imports
    compare(folder, ["none"], show=lambda line: None, done=lambda name: None)
    assert "has no mechanism none" in (folder.result("none") or {})["failed"]
    assert [each.name for each in here.iterdir()] == ["torch.py"]
