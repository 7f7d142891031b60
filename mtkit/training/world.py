"""The processes that train together: torchrun starts them, they decide together, and each watches another.

A thread of each process writes a rising number into the store of the process group and watches the next rank's number.
A process that stops writing, because its machine failed or stopped, ends the training with its rank in the message; a
collective operation would wait for it for hours. The thread writes whatever the process does, also during validation
and checkpoints. A ring of watchers suffices: among several silent processes one has a watcher that is alive.
"""

import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from time import monotonic
from typing import Any, Protocol, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from mtkit.device import find_device
from mtkit.errors import RunError

INTERVAL = 3.0
"""Seconds between heartbeats."""

SILENCE = 45.0
"""Seconds without a heartbeat after which a process counts as lost."""

DONE = "done"
"""The last heartbeat of a process that ends regularly."""


class Heartbeat:
    """The heartbeat of one process, and its watch over the next."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """`store` is a torch.distributed store whose client no other thread uses."""
        self._store, self._rank, self._watched = store, rank, (rank + 1) % size
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the heartbeat and the watch."""
        self._thread.start()

    def stop(self) -> None:
        """Announce that this process ends, and stop watching."""
        self._left.set()
        self._thread.join()

    def _beat(self) -> None:
        last, since, number = "", monotonic(), 0
        try:
            while not self._left.wait(INTERVAL if number else 0.0):
                number += 1
                self._store.set(_key(self._rank), str(number))
                seen = self._store.get(_key(self._watched)).decode() if self._store.check([_key(self._watched)]) else ""
                if seen != last:
                    last, since = seen, monotonic()
                if seen != DONE and monotonic() - since > SILENCE:
                    _end(
                        f"process {self._watched} of this training has given no sign of life for {SILENCE:.0f} s, so "
                        f"process {self._rank} ends it; check that machine. The same command resumes from the last "
                        "checkpoint"
                    )
                    return
            self._store.set(_key(self._rank), DONE)
        except RuntimeError:  # the store ended with torchrun, which ends all processes unless it was killed
            return


def _key(rank: int) -> str:
    return f"mtkit/heartbeat/{rank}"


def _end(message: str) -> None:
    """Exit at once: the main thread may wait in an operation that nothing interrupts. torchrun ends the others."""
    with suppress(AttributeError, OSError, ValueError):  # nobody may be there to read it
        sys.stderr.write(f"mtkit: {message}\n")
        sys.stderr.flush()
    os._exit(1)


PATIENCE = timedelta(hours=12)
"""Time limit of collective operations, e.g. during checkpoints; heartbeats notice a lost process earlier."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Read error", "Broken pipe")
"""Parts of gloo's messages in a process when another has ended."""


class Closed(Protocol):
    """Closed before the process group is destroyed."""

    def close(self) -> None: ...


class World:
    """The processes that train together; a single one without torchrun."""

    def __init__(self, device: str = "auto") -> None:
        """`device` is a name for `find_device`; with several processes, each has the GPU of its local rank.

        Raises: MtkitError if there is no such device; RunError if a process has no GPU.
        """
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1 and (device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())):
            local = int(os.environ.get("LOCAL_RANK", "0"))
            count = torch.cuda.device_count()
            if local >= count:  # in words that all these processes share: torchrun's user reads them once
                wanted = f"{os.environ.get('LOCAL_WORLD_SIZE', self.size)} processes need a GPU each"
                fewer = f"start {count} here with --nproc-per-node {count}, or " if count else ""
                raise RunError(f"{wanted}, and this machine has {count}; {fewer}use --device cpu")
            device = f"cuda:{local}"
            # before any allocation, which would otherwise be on the first GPU
            torch.cuda.set_device(torch.device(device))
        self.device = find_device(device)
        if self.size == 1 and self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # Triton's kernels run there only
        self._closed: WeakSet[Closed] = WeakSet()

    def __enter__(self) -> Self:
        if self.size > 1:
            # PyTorch's parallel modules import torch._dynamo at first use, and with it modules that hold the default
            # group as a default argument forever. gloo's threads then outlive the group, and one that frees a tensor
            # while the interpreter exits aborts the process. Imported before there is a group, they hold none.
            import_module("torch._dynamo")
            base_store, *_ = next(rendezvous("env://", self.rank, self.size))
            # torchrun restarts all processes if one has died or machines have joined: a prefix hides the earlier
            # processes' entries in the store
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store: Any = PrefixStore(f"mtkit/{restart}/{self.size}", base_store)
            # decisions are sent by gloo in CPU tensors, so that they never wait for a GPU
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=PATIENCE)
            self._heartbeat = Heartbeat(store.clone(), self.rank, self.size)
            self._heartbeat.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.size == 1:
            return
        self._heartbeat.stop()
        for closed in self._closed:
            closed.close()
        dist.destroy_process_group()
        if isinstance(error, RuntimeError) and any(message in str(error) for message in LOST):
            raise RunError(
                f"process {self.rank} lost the connection to another process of this training, which ended; see the "
                "error of that process. The same command resumes from the last checkpoint"
            ) from error

    def close_at_end(self, closed: Closed) -> None:
        """Close this object, if it still exists, before the process group is destroyed.

        PyTorch objects that hold the group from C++ need it. The last one to release the group waits for gloo's threads
        while it holds Python's lock, and these threads need the lock to free a tensor.
        """
        self._closed.add(closed)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def agree(self, *values: float) -> list[float]:
        """Return the largest of each value over all processes, so that all act alike; without values, a barrier."""
        if self.size == 1:
            return list(values)
        largest = torch.tensor([*values, 0.0], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        agreed: list[float] = largest.tolist()
        return agreed[:-1]

    def sum(self, values: Tensor) -> None:
        """Replace values on the CPU by their sums over all processes."""
        if self.size > 1:
            dist.all_reduce(values)

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Replace the content of tensors by their content in the first process."""
        for tensor in tensors if self.size > 1 else ():
            sent = tensor.detach().contiguous()
            dist.broadcast(sent, 0)
            tensor.detach().copy_(sent)

    def share(self, count: int) -> range:
        """Return the indices of this process among so many items."""
        return range(self.rank, count, self.size)

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all processes, by rank, on the first process; None on the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.first else None
        dist.gather_object(value, values)
        return values
