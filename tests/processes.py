"""Several processes at once, with what torchrun tells them, and without what an interpreter takes to begin."""

import faulthandler
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Found = TypeVar("Found")

PATIENCE = 240.0
"""Seconds after which processes that wait for one another have failed."""


def together(processes: int, work: Callable[..., Found], *arguments: Any) -> list[Found]:
    """What `work(*arguments)` gives in each of so many processes, by rank; a `World` in it is theirs.

    A server forks them, which no test has run in: torch and mtkit, whose import takes longer than most tests, are there
    already, and no thread holds a lock that they would wait for. `work` is a function of a module; what it is given and
    gives can be pickled. Raises: AssertionError with the trace of the first that failed or that a signal ended.
    """
    with TemporaryDirectory() as folder:
        return _together(processes, work, arguments, Path(folder))


def _together(processes: int, work: Callable[..., Found], arguments: tuple[Any, ...], folder: Path) -> list[Found]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mtkit.training.train", "torch._dynamo"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))
    told = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    told["TORCHELASTIC_USE_AGENT_STORE"] = True
    pipes, children = [], []
    for rank in range(processes):
        receive, send = context.Pipe(duplex=False)
        mine = {"RANK": rank, "LOCAL_RANK": rank} | told
        child = context.Process(target=_child, args=(send, mine, folder / str(rank), work, arguments))
        child.start()
        send.close()
        pipes.append(receive)
        children.append(child)
    found: dict[int, Found] = {}
    deadline = monotonic() + PATIENCE
    try:
        while missing := [pipe for rank, pipe in enumerate(pipes) if rank not in found]:
            ready = wait(missing, timeout=deadline - monotonic())
            assert ready, f"{len(missing)} of {processes} processes gave nothing in {PATIENCE:.0f} seconds"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.index(pipe)
                try:
                    result, trace = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    children[rank].join()
                    said = (folder / str(rank)).read_text()
                    raise AssertionError(f"process {rank} ended with code {children[rank].exitcode}\n{said}") from None
                assert trace is None, trace
                found[rank] = result
    finally:
        for child in children:
            child.kill() if len(found) < processes else child.join()
    return [found[rank] for rank in range(processes)]


def _child(
    send: Connection, told: dict[str, object], errors: Path, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # what is said by libraries too
    faulthandler.enable()
    os.environ.update({name: str(value) for name, value in told.items()})
    torch.set_num_threads(1)
    try:
        found = work(*arguments), None
    except BaseException:
        found = None, traceback.format_exc()
    # tensors by value: those that `send` takes are in memory that ends with this process
    send.send_bytes(pickle.dumps(found))
