"""Trials of a comparison on a Ray cluster: each is a task with CPUs or a GPU on any node.

The folder of the comparison, the prepared data and the current folder lie on a file system that all nodes see. A task
runs the same process as on one machine (`mtkit.experiments.run`), with the same lock, log and row. If its node dies,
Ray starts the task on another node, and the trial resumes from its last checkpoint.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from types import FrameType
from typing import Any, Self

from mtkit.errors import MtkitError, first_line
from mtkit.experiments.children import SAVING_SECONDS, child_command, how_ended, last_step, package_root
from mtkit.experiments.folder import Folder
from mtkit.experiments.trials import Trial
from mtkit.process import signals_to
from mtkit.storage.files import inside, write_text
from mtkit.version import __version__

RETRIES = 10
"""Starts of a trial after the first one, when its nodes die."""
CONNECT_SECONDS = 10.0
"""Time for a connection to the cluster."""
CHECK_SECONDS = 300.0
"""Time that the first task of a node has: it starts a Python process there."""


@dataclass
class _Task:
    result: Any
    """Reference to the status of the trial's process."""
    log: Path
    offset: int
    """Bytes of the log before the task was started."""
    cancelled: bool = False


class Cluster:
    """Runs trials on a Ray cluster; SIGTERM and SIGINT stop their processes, which save."""

    def __init__(
        self, folder: Folder, device: str, threads: int | None, address: str, paths: Collection[Path] = ()
    ) -> None:
        """Run trials on the cluster at `address`; `paths` are files and folders that they read.

        `device` "auto" is a GPU if the cluster has any. By default, a trial has as many threads as the smallest node
        has CPUs, or CPUs per GPU.

        Raises: MtkitError if Ray is not installed.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise MtkitError("--ray needs Ray; install it: pip install 'mtkit[ray]'") from error
        self._ray: Any = ray
        self.signal: int | None = None
        self._folder, self._address = folder, address
        self._device, self._threads = device, threads or 0
        self._paths = [os.path.abspath(path) for path in (Path(), *paths)]
        self._tasks: dict[str, _Task] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Connect to the cluster. Raises: MtkitError if there is none, or if a node does not see the folder."""
        self._stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # Ray changes it
        try:
            _connect(self._address)
            self._ray.init(self._address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            self._stack.close()
            raise MtkitError(
                f"cannot reach a Ray cluster at {self._address} ({first_line(error)}); start one with "
                "`ray start --head`"
            ) from error
        self._stack.callback(self._ray.shutdown)
        # the functions of this module travel by value: nodes need not import it
        self._ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self._stack.callback(self._ray.cloudpickle.unregister_pickle_by_value, sys.modules[__name__])
        try:
            self._choose_resources()
            self._check_nodes()
        except BaseException:
            self._stack.close()
            raise
        self._stack.enter_context(signals_to(self._record))
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._tasks:  # after an error
            self.stop(name)
        if results := [task.result for task in self._tasks.values()]:
            self._ray.wait(results, num_returns=len(results), timeout=SAVING_SECONDS)
        self._stack.close()

    @property
    def slots(self) -> int:
        """Number of trials that fit on the nodes, which may come and go; at least 1, which waits for a node."""
        return max(sum(map(self._capacity, self._nodes().values())), 1)

    def start(self, trial: Trial) -> None:
        """Submit a trial's task."""
        log, offset = self._folder.open_log(trial.name)
        shared = ["--shared"] if any(self._capacity(node) > 1 for node in self._nodes().values()) else []
        options = ["--threads", str(self._threads), "--device", self._device, *shared]
        folder = Folder(Path(os.path.abspath(self._folder.path)))
        command = child_command(folder, trial.name, options)[1:]
        task = self._ray.remote(_train).options(
            name=trial.name, num_cpus=self._threads, num_gpus=int(self._on_gpu), max_retries=RETRIES
        )
        result = task.remote(command, self._paths[0], package_root(), os.path.abspath(log))
        self._tasks[trial.name] = _Task(result, log, offset)

    def ended(self) -> list[tuple[str, str]]:
        """Return the trials whose tasks have ended since the last call, and how they ended."""
        if self.signal is not None:
            for name in self._tasks:
                self.stop(name)
        names = {task.result: name for name, task in self._tasks.items()}
        if not names:
            return []
        results, _ = self._ray.wait(list(names), num_returns=len(names), timeout=0)
        for result in results:
            del self._tasks[names[result]]
        return [(names[result], self._how_ended(result)) for result in results]

    def stop(self, name: str) -> None:
        """Interrupt a trial's task, which sends SIGTERM to its process; a task that has no node yet is removed."""
        task = self._tasks[name]
        if not task.cancelled:
            task.cancelled = True
            self._ray.cancel(task.result)

    def step(self, name: str) -> str:
        """Return the last line of progress in a trial's log."""
        task = self._tasks[name]
        if task.log.stat().st_size <= task.offset:
            return "starting, or waiting for a node"
        return last_step(task.log, task.offset)

    def _choose_resources(self) -> None:
        nodes = self._nodes().values()
        if self._device == "auto":
            self._device = "cuda" if any(node.get("GPU", 0) >= 1 for node in nodes) else "cpu"
        usable = [node for node in nodes if node.get("CPU", 0) >= 1 and (not self._on_gpu or node.get("GPU", 0) >= 1)]
        if not self._threads and usable:
            per_trial = (node["CPU"] / (node["GPU"] if self._on_gpu else 1) for node in usable)
            self._threads = max(int(min(per_trial)), 1)
        if not any(map(self._capacity, usable)):
            gpu = " and a GPU" if self._on_gpu else ""
            raise MtkitError(
                f"no node of the Ray cluster has {self._threads or 1} CPUs{gpu}; give other --threads or --device"
            )

    def _check_nodes(self) -> None:
        """Raise MtkitError unless every usable node sees this folder and has this version of mtkit."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        token = token_hex(8)
        self._folder.logs.mkdir(parents=True, exist_ok=True)
        path = inside(self._folder.path, "logs", f"{token}.ray")
        write_text(path, token)
        try:
            seen = {
                node: self._ray.remote(_look)
                .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
                .remote(self._paths, package_root(), os.path.abspath(path), token, __version__)
                for node, resources in self._nodes().items()
                if self._capacity(resources)
            }
            faults = self._ray.get(list(seen.values()), timeout=CHECK_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise MtkitError(f"a node of the Ray cluster does not answer ({first_line(error)})") from error
        finally:
            path.unlink(missing_ok=True)
        if fault := next(filter(None, faults), None):
            raise MtkitError(
                f"{fault}; --ray needs {self._folder.path}, the data and this version of mtkit on all nodes: use a "
                "shared file system"
            )

    def _nodes(self) -> dict[str, Mapping[str, float]]:
        """Return the resources of the living nodes."""
        return {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}

    def _capacity(self, node: Mapping[str, float]) -> int:
        """Return the number of trials that fit on a node at the same time."""
        by_threads = int(node.get("CPU", 0) // max(self._threads, 1))
        return min(by_threads, int(node.get("GPU", 0))) if self._on_gpu else by_threads

    @property
    def _on_gpu(self) -> bool:
        return self._device.startswith("cuda")

    def _how_ended(self, result: Any) -> str:
        try:
            return how_ended(self._ray.get(result))
        except self._ray.exceptions.RayError as error:
            return f"was lost by Ray ({first_line(error)})"

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = number  # `ended` stops the tasks: Ray's functions must not be called in a signal handler


def _connect(address: str) -> None:
    """Raise OSError or ValueError if nothing answers at HOST:PORT: Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    elif address != "auto":
        raise ValueError("write auto or HOST:PORT")


def _environment(root: str) -> dict[str, str]:
    """Return a node's environment for a process that imports the mtkit in the folder `root`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}


def _train(command: list[str], place: str, root: str, log: str) -> int:
    """Run a trial's process on a node, and return its status. Ray's cancel is a KeyboardInterrupt here.

    If Ray kills this process, standard input of the trial's process closes, and it saves and stops.
    """
    # a Ray that was started in the background of a script ignores SIGINT, and with it Ray's cancel
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=place,
            env=_environment(root),
        )
    try:
        while process.poll() is None:
            time.sleep(0.2)  # a wait without a limit would not be interrupted
    except KeyboardInterrupt:
        process.terminate()
    return process.wait()


def _look(paths: list[str], root: str, token_path: str, token: str, version: str) -> str | None:
    """Return what a node lacks: a path, the file with the token of this comparison, or this version of mtkit."""
    node = f"the node {os.uname().nodename}"
    for path in paths:
        if not os.path.exists(path):
            return f"{node} does not see {path}"
    try:
        with open(token_path) as file:
            same = file.read() == token
    except OSError:
        same = False
    if not same:
        return f"{node} does not see {os.path.dirname(os.path.dirname(token_path))}"
    shown = subprocess.run(
        [sys.executable, "-P", "-c", "from mtkit.version import __version__; print(__version__)"],
        env=_environment(root),
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return None if shown == version else f"{node} has mtkit {shown or 'not installed'}, not {version}"
