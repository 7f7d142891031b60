"""Trials on a Ray cluster of two nodes on this machine."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mtkit.errors import MtkitError
from mtkit.experiments.children import package_root
from mtkit.experiments.cluster import Cluster, _look
from mtkit.experiments.compare import compare
from mtkit.experiments.folder import Folder
from mtkit.experiments.table import build
from mtkit.version import __version__
from tests.experiments.busy import ENDLESS, SignalWhenBusy
from tests.experiments.conftest import Made, Opened

slow = pytest.mark.slow  # Ray's processes take ten seconds to start

SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of two nodes with a CPU each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster as Nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as if a script had started Ray in its background
        started = Nodes(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
        try:
            started.add_node(**SMALL)
            signal.signal(signal.SIGINT, before)
            yield started
        finally:
            ray.shutdown()
            started.shutdown()


def run(folder: Folder, plan: Any, data: Any, address: str, show: Any = str) -> int | None:
    with Cluster(folder, "auto", None, address) as cluster:
        return compare(folder, plan, data, cluster, show=show, done=str)


def processes(folder: Folder) -> dict[str, int]:
    """The trials of a folder that are running, with their process ids."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "mtkit.experiments.run" in words and os.path.abspath(folder.path) in words:
                found[words[words.index("mtkit.experiments.run") + 2]] = int(entry.name)
    return found


@slow
def test_a_node_that_dies_loses_no_trial(tiny: Made, opened: Opened, nodes: Any) -> None:
    training = {"max_updates": 600, "validate_every": 50}
    folder, plan, data = opened(tiny("full", "band", "linear", settings={"training": training}))
    killed: list[str] = []

    def show(line: str) -> None:
        """Kill the second node with all its processes when a trial trains on each node and has saved."""
        running = processes(folder)
        saved = [name for name in running if list((folder.run(name) / "checkpoints").glob("update-*"))]
        if killed or len(saved) < 2:
            return
        raylet = nodes.worker_nodes.copy().pop().all_processes["raylet"][0].process.pid
        below = descendants(raylet)
        killed.extend(name for name, number in running.items() if number in below)
        for number in (raylet, *below):  # from the top: a task must not report the end of its process
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)

    assert run(folder, plan, data, nodes.address, show) is None
    assert len(killed) == 1
    rows = folder.rows()
    assert [row["trial"] for row in rows] == ["full.seed-1", "band.seed-1", "linear.seed-1"]
    assert all("failed" not in row and row["training"]["updates"] == 600 for row in rows)
    assert [row["shared"] for row in rows] == [False] * 3
    assert len(build(folder).lines) == 3
    text = folder.log(killed[0]).read_text()
    assert "from update" in text  # it resumed from its last checkpoint
    assert processes(folder) == {}
    nodes.add_node(**SMALL)


def descendants(parent: int) -> list[int]:
    """The ids of the processes below a process, parents first."""
    pairs = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split("\n")
    children: dict[int, list[int]] = {}
    for line in filter(None, pairs):
        number, above = map(int, line.split())
        children.setdefault(above, []).append(number)
    found, new = list[int](), [parent]
    while new:
        new = [child for each in new for child in children.get(each, [])]
        found += new
    return found


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_trials_which_save(tiny: Made, opened: Opened, nodes: Any, number: int) -> None:
    folder, plan, data = opened(tiny("full", "band", "linear", settings=ENDLESS))
    before, show = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)], SignalWhenBusy(number)
    assert run(folder, plan, data, nodes.address, show) == number
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    assert folder.rows() == []
    for name in show.busy:
        assert len(list((folder.run(name) / "checkpoints").glob("update-*"))) == 1
    assert processes(folder) == {}


@slow
def test_a_killed_driver_leaves_no_process_and_the_same_command_resumes(
    tiny: Made, opened: Opened, nodes: Any, tmp_path: Path
) -> None:
    training = {"max_updates": 600, "validate_every": 100}
    folder, plan, data = opened(tiny("full", "band", settings={"training": training}))
    script = """
import pickle, sys
from mtkit.experiments.cluster import Cluster, _look
from mtkit.experiments.children import package_root
from mtkit.experiments.compare import compare
folder, plan, data, address = pickle.load(sys.stdin.buffer)
with Cluster(folder, "auto", None, address) as cluster:
    compare(folder, plan, data, cluster, show=str, done=str)
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    assert driver.stdin is not None
    driver.stdin.write(pickle.dumps((folder, plan, data, nodes.address)))
    driver.stdin.close()
    logs = [folder.log(name) for name in ("full.seed-1", "band.seed-1")]
    wait_for(lambda: all(log.exists() and "update " in log.read_text() for log in logs), driver)
    driver.kill()
    driver.wait()
    wait_for(lambda: not processes(folder))
    assert folder.rows() == []
    assert run(folder, plan, data, nodes.address) is None
    assert all("failed" not in row for row in folder.rows())
    assert len(folder.rows()) == 2


def wait_for(condition: Any, process: Any = None) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.1)


@slow
def test_what_does_not_fit_is_refused_at_once(tiny: Made, opened: Opened, nodes: Any, tmp_path: Path) -> None:
    folder, _, _ = opened(tiny("full"))
    for cluster, message in (
        (Cluster(folder, "auto", 2, nodes.address), "no node of the Ray cluster has 2 CPUs; give other --threads"),
        (Cluster(folder, "cuda", 1, nodes.address), "has 1 CPUs and a GPU"),
        (Cluster(folder, "auto", 1, nodes.address, [tmp_path / "none"]), "does not see .*/none; --ray needs"),
    ):
        with pytest.raises(MtkitError, match=message), cluster:
            raise AssertionError("it has started")
        assert not pytest.importorskip("ray").is_initialized()
    assert list(folder.logs.glob("*.ray")) == []
    with Cluster(folder, "auto", None, nodes.address) as chosen:
        assert (chosen.slots, chosen._threads, chosen._device) == (2, 1, "cpu")


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MtkitError, match=r"--ray needs Ray; install it: pip install 'mtkit\[ray\]'"):
        Cluster(Folder(tmp_path), "auto", None, "auto")


def test_a_node_is_looked_at(tmp_path: Path) -> None:
    token = tmp_path / "out" / "logs" / "t.ray"
    token.parent.mkdir(parents=True)
    token.write_text("abc")
    assert _look([str(tmp_path)], package_root(), str(token), "abc", __version__) is None
    for given, message in (
        (([str(tmp_path / "none")], package_root(), str(token), "abc", __version__), f"see {tmp_path / 'none'}"),
        (([], package_root(), str(token), "xyz", __version__), f"does not see {tmp_path / 'out'}"),
        (([], package_root(), str(tmp_path / "logs" / "t.ray"), "abc", __version__), f"does not see {tmp_path}"),
        (([], package_root(), str(token), "abc", "99.0"), f"has mtkit {__version__}, not 99.0"),
    ):
        assert message in (_look(*given) or "")


def test_the_room_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs and GPUs decide how many trials fit, and how many threads each has."""
    pytest.importorskip("ray")
    nodes = {"head": {"memory": 1.0}, "one": {"CPU": 8.0, "GPU": 2.0}, "two": {"CPU": 16.0, "GPU": 2.0}}
    monkeypatch.setattr(Cluster, "_nodes", lambda self: nodes)

    def chosen(device: str, threads: int | None) -> tuple[str, int, int]:
        cluster = Cluster(Folder(tmp_path), device, threads, "auto")
        cluster._choose_resources()
        return cluster._device, cluster._threads, cluster.slots

    assert chosen("auto", None) == ("cuda", 4, 4)
    assert chosen("cpu", None) == ("cpu", 8, 3)
    assert chosen("cpu", 3) == ("cpu", 3, 7)
    assert chosen("auto", 16) == ("cuda", 16, 1)
    nodes.pop("two")
    with pytest.raises(MtkitError, match="no node of the Ray cluster has 16 CPUs and a GPU"):
        chosen("auto", 16)


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:1", r"at 127\.0\.0\.1:1 \(.*refused\); start one"), ("nonsense", r"write auto or HOST:PORT")],
)
def test_an_address_without_a_cluster_is_one_line(tmp_path: Path, address: str, message: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(MtkitError, match=message), Cluster(Folder(tmp_path), "auto", None, address):
        raise AssertionError("it has started")
