"""Processes that are lost: stopped ones are named by the rank that watches them, dead ones are one line."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtkit.training import world
from mtkit.training.world import Heartbeat

SCRIPT = """
import os, signal, sys, time
from mtkit.errors import MtkitError
from mtkit.training import world as module
from mtkit.training.world import World
module.INTERVAL, module.SILENCE = 0.2, 3.0
try:
    with World("cpu") as world:
        world.agree()
        if world.rank == 2 and sys.argv[1] != "none":
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        if sys.argv[1] == "none":
            time.sleep(5.0 * world.first)  # one works on while the others wait: no silence
        world.agree()
except MtkitError as error:
    sys.exit(f"mtkit: {error}")
"""


def end_of(how: str, folder: Path) -> tuple[list[int], list[str]]:
    """Exit codes and messages of three processes, the last of which gets a signal of this name while they wait."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(Path(__file__).parents[3])
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen([sys.executable, str(script), how], env=env | {"RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    until = time.monotonic() + 120
    ending = started[:2] if how == "SIGSTOP" else started
    while time.monotonic() < until and any(each.poll() is None for each in ending):
        time.sleep(0.1)
    for each in started:
        if each.poll() is None:
            each.send_signal(signal.SIGKILL)
    messages = [each.communicate()[1].decode() for each in started]
    return [each.returncode for each in started], messages


def test_a_stopped_process_ends_all_by_its_rank(tmp_path: Path) -> None:
    codes, messages = end_of("SIGSTOP", tmp_path)
    assert codes[1] == 1
    assert "mtkit: process 2 of this training has given no sign of life for 3 s, so process 1 ends it" in messages[1]
    assert codes[0] == 1


def test_a_killed_process_is_one_line_in_the_others(tmp_path: Path) -> None:
    codes, messages = end_of("SIGKILL", tmp_path)
    assert codes[0] == codes[1] == 1
    lost = "mtkit: process 0 lost the connection to another process of this training, which ended"
    assert lost in messages[0]
    assert "Traceback" not in messages[0]


def test_long_work_of_one_process_is_no_silence(tmp_path: Path) -> None:
    codes, messages = end_of("none", tmp_path)
    assert codes == [0, 0, 0], messages


class Store(dict):  # type: ignore[type-arg]
    """A store in memory."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_who_has_left_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "INTERVAL", 0.01)
    monkeypatch.setattr(world, "SILENCE", 0.1)
    store, said = Store(), list[str]()
    monkeypatch.setattr(world, "_end", said.append)
    first, second = (Heartbeat(store, rank, 2) for rank in range(2))
    first.start()
    second.start()
    second.stop()
    time.sleep(0.3)
    first.stop()
    assert said == []
    assert set(store.values()) == {b"done"}
