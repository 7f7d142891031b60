import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout

from mtkit.errors import MtkitError
from mtkit.experiments import compare as comparing
from mtkit.experiments.children import Children, how_ended
from mtkit.experiments.compare import compare, outcome_of
from mtkit.experiments.folder import Folder
from mtkit.experiments.run import run_trial
from mtkit.experiments.trials import Plan, Trial
from tests.experiments.busy import ENDLESS, SignalWhenBusy
from tests.experiments.conftest import Made, Opened
from tests.experiments.results import row


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "LOOK_SECONDS", 0.02)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Shown(list[str]):
    def __call__(self, line: str) -> None:
        self.append(line)


def run(
    folder: Folder, plan: Any, data: Any, jobs: int = 1, show: Any = lambda line: None
) -> tuple[int | None, list[str]]:
    done: list[str] = []
    with Children(folder, "cpu", 1, jobs) as children:
        return compare(folder, plan, data, children, show=show, done=done.append), done


class Recorded:
    """A runner whose trials end at once, with rows or with a failure."""

    def __init__(self, folder: Folder, *, slots: int = 1, fails: tuple[str, ...] = ()) -> None:
        self.folder, self.slots, self.fails = folder, slots, fails
        self.signal: int | None = None
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.most = 0
        self._running: list[str] = []

    def start(self, trial: Trial) -> None:
        assert self.folder.row(trial.name) is None
        self.started.append(trial.name)
        self._running.append(trial.name)
        self.most = max(self.most, len(self._running))

    def ended(self) -> list[tuple[str, str]]:
        names, self._running = self._running, []
        for name in names:
            if name not in self.fails:
                self.folder.keep(name, None, **row(50.0))
        return [(name, "was stopped by SIGKILL, perhaps out of memory") for name in names]

    def stop(self, name: str) -> None:
        self.stopped.append(name)

    def step(self, name: str) -> str:
        return "training"


def test_one_that_fails_does_not_lose_the_others(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("routing[local_heads=5]", "full"))
    shown = Shown()
    assert run(folder, plan, data, show=shown) == (None, ["routing-local_heads-5.seed-1", "full.seed-1"])
    failed, full = folder.rows()
    assert "local_heads" in failed["failed"]
    assert "\n" not in failed["failed"]
    assert full["scores"]["test"]["BLEU"]["value"] >= 0
    assert any(line.startswith(f"[2/2] full.seed-1 ({folder.log('full.seed-1')}): training") for line in shown)


def test_what_is_done_is_not_done_again_and_a_failure_is_tried_again_once(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", "band", "linear"))
    for trial, failed in zip(plan.due([]), (False, True, True), strict=True):
        folder.add(trial, data[None])
        if failed:
            folder.fail(trial.name, "for some reason")
        else:
            folder.keep(trial.name, None, **row(5.0))
    runner = Recorded(folder, fails=("linear.seed-1",))
    assert compare(folder, plan, data, runner, show=print, done=lambda name: None) is None
    assert runner.started == ["band.seed-1", "linear.seed-1"]
    assert "SIGKILL, perhaps out of memory" in (folder.row("linear.seed-1") or {})["failed"]
    assert "failed" not in (folder.row("band.seed-1") or {})


def test_a_failure_names_its_trial_and_its_log_once(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", "band"))
    one, two = plan.due([])
    folder.add(one, data[None])
    compare(folder, plan, data, Recorded(folder, fails=(one.name,)), show=print, done=lambda name: None)
    assert outcome_of(folder, one.name).count(str(folder.log(one.name))) == 1
    wrong = replace(two, name="wrong", recipe={**two.recipe, "model": {"d_model": 35.5}})
    folder.add(wrong, data[None])
    with pytest.raises(MtkitError) as raised:
        run_trial(folder, wrong.name, torch.device("cpu"), {})
    folder.fail(wrong.name, str(raised.value))
    assert outcome_of(folder, wrong.name).startswith("wrong: failed: its recipe: model.d_model = 35.5:")


def test_a_real_time_signal_has_no_name() -> None:
    assert how_ended(-9) == "was stopped by SIGKILL, perhaps out of memory"
    assert how_ended(-40) == "was stopped by signal 40"


def test_a_search_goes_on_with_the_seeds_of_its_choice(tiny: Made, opened: Opened) -> None:
    search = {"settings": {"peak_rate": [1e-3, 3e-3]}, "share": 0.5}
    folder, plan, data = opened(tiny("full", seeds=2, search=search))
    runner = Recorded(folder, slots=8)
    compare(folder, plan, data, runner, show=print, done=lambda name: None)
    assert runner.most == 2
    assert len(runner.started) == 4
    assert [name.endswith(".search") for name in runner.started] == [True, True, False, False]


def test_slots_are_filled_and_not_overfilled(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", seeds=7))
    runner = Recorded(folder, slots=3)
    compare(folder, plan, data, runner, show=print, done=lambda name: None)
    assert (runner.most, len(runner.started)) == (3, 7)


def test_two_commands_share_a_folder(tiny: Made, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial that another process holds is left to it, and its row is waited for."""
    monkeypatch.setattr(comparing, "WAITS", 2)
    folder, plan, data = opened(tiny("full", "band"))
    lock = folder.claim("full.seed-1")
    lock.parent.mkdir(parents=True)
    shown, runner = Shown(), Recorded(folder)

    def other() -> None:
        with FileLock(lock):
            ready.set()
            while not any("waiting" in line for line in shown):
                time.sleep(0.01)
            folder.keep("full.seed-1", None, **row(77.0))

    ready = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    assert compare(folder, plan, data, runner, show=shown, done=lambda name: None) is None
    thread.join()
    assert runner.started == ["band.seed-1"]
    assert [each["scores"]["test"]["BLEU"]["value"] for each in folder.rows()] == [77.0, 50.0]


def test_a_trial_that_another_command_has_just_finished_is_left(tiny: Made, opened: Opened) -> None:
    """Its row comes between the reading of the rows and the claim."""
    folder, plan, data = opened(tiny("full", "band"))

    class Late(Folder):
        def begun(self) -> list[dict[str, Any]]:
            found = super().begun()
            if not found:
                for trial in plan.due([]):
                    self.add(trial, data[None])
                self.keep("full.seed-1", None, **row(77.0))
            return found

    runner = Recorded(folder)
    compare(Late(folder.path), plan, data, runner, show=str, done=str)
    assert runner.started == ["band.seed-1"]
    assert [each["scores"]["test"]["BLEU"]["value"] for each in folder.rows()] == [77.0, 50.0]


def test_a_failure_of_another_command_is_not_tried_again(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", "band"))
    runner = Recorded(folder)

    def done(name: str) -> None:
        if name == "full.seed-1":  # meanwhile
            folder.add(plan.due([])[1], data[None])
            folder.fail("band.seed-1", "for some reason")

    compare(folder, plan, data, runner, show=str, done=done)
    assert runner.started == ["full.seed-1"]


def test_a_process_that_starts_has_claimed_its_trial(tiny: Made, opened: Opened) -> None:
    """A second command, which begins before the child has its lock, takes another trial."""
    folder, plan, data = opened(tiny("full", "band", "linear"))
    second = Recorded(folder)

    class First(Recorded):
        def start(self, trial: Trial) -> None:
            super().start(trial)
            if trial.name == "full.seed-1":
                compare(folder, _First(plan, 2), data, second, show=str, done=str)

    class _First:
        def __init__(self, plan: Plan, number: int) -> None:
            self.plan, self.number = plan, number

        def due(self, rows: Any, begun: Any = ()) -> list[Trial]:
            return [trial for trial in self.plan.due(rows, begun)[: self.number] if trial.name != "full.seed-1"]

    first = First(folder)
    compare(folder, plan, data, first, show=str, done=str)
    assert (first.started, second.started) == (["full.seed-1", "linear.seed-1"], ["band.seed-1"])


def test_a_folder_without_locks_is_one_line(tiny: Made, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plan, data = opened(tiny("full"))
    monkeypatch.setattr(FileLock, "_acquire", lambda self: (_ for _ in ()).throw(OSError(37, "No locks available")))
    with pytest.raises(MtkitError, match=r"cannot lock .*No locks available; choose a writable"):
        compare(folder, plan, data, Recorded(folder), show=str, done=str)


def test_jobs_run_together_and_their_timings_are_marked(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", "band"))
    shown = Shown()
    run(folder, plan, data, jobs=2, show=shown)
    assert [each["shared"] for each in folder.rows()] == [True, True]
    assert {line.split()[1] for line in shown[:4]} == {"full.seed-1", "band.seed-1"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_the_children_which_save_and_leave(tiny: Made, opened: Opened, number: signal.Signals) -> None:
    folder, plan, data = opened(tiny("full", "band", "linear", settings=ENDLESS))
    before, show = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)], SignalWhenBusy(number)
    assert run(folder, plan, data, jobs=2, show=show) == (number, [])
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    assert folder.rows() == []
    assert not folder.log("linear.seed-1").exists()
    for name in ("full.seed-1", "band.seed-1"):
        assert len(list((folder.run(name) / "checkpoints").glob("update-*"))) == 1
        assert _nobody_works_on(folder.lock(name))


def test_a_signal_before_the_child_listens_stops_it_too(tiny: Made, opened: Opened) -> None:
    folder, plan, data = opened(tiny("full", settings={"training": {"max_updates": 100_000}}))
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begin = time.monotonic()
    assert run(folder, plan, data)[0] == signal.SIGTERM
    assert time.monotonic() - begin < 60
    assert folder.rows() == []


def test_every_slot_has_a_gpu(tiny: Made, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, _ = opened(tiny("full"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    children = Children(folder, "cuda", 1, 3)
    assert [children._device_of(slot) for slot in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": name} for name in ("4", "6", "4")
    ]
    assert Children(folder, "cpu", 1, 3)._device_of(0) == {}
    assert Children(folder, "cuda", 1, 1)._device_of(0) == {}


def _nobody_works_on(lock: Path) -> bool:
    """A process holds the lock of its trial as long as it lives."""
    try:
        with FileLock(lock, blocking=False):
            return True
    except Timeout:
        return False


class _Absent:
    """A plan of a trial whose settings are nowhere."""

    def due(self, rows: Any, begun: Any = ()) -> list[Trial]:
        return [Trial("none", "none", None, 1, "final", {}, {"data": {"folder": "nowhere"}})]


def test_no_code_of_the_current_folder_is_run(
    tiny: Made, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = opened(tiny("full"))
    here = tmp_path / "here"
    here.mkdir()
    (here / "torch.py").write_text("open('ran', 'w'); raise SystemExit(3)")
    monkeypatch.chdir(here)
    run(folder, _Absent(), {None: "x"})
    assert "mtkit prepare" in (folder.row("none") or {})["failed"]
    assert [each.name for each in here.iterdir()] == ["torch.py"]


def test_a_plan_is_what_compare_takes(tiny: Made) -> None:
    plan: comparing.Planned = Plan(tiny("full"), {None: {}}, {})
    assert len(plan.due([])) == 1
