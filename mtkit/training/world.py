"""Signs of life of the processes that train together: one that is silent ends the training, with its rank named.

A thread of each process writes a number that rises into the store of the process group, and watches that of the next
rank. It says that a process lives, whatever its work takes: validation and checkpoints on one process are no silence. A
process that a machine lost or stopped has none, where a collective operation would wait for it for hours. A ring of
watchers suffices: of several silent processes one has a watcher that lives.

Several processes as one: torchrun starts them, and they decide together.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
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
from mtkit.storage.files import json_text

INTERVAL = 3.0
"""Seconds between signs of life."""

SILENCE = 45.0
"""Seconds without one after which a process counts as lost."""

DONE = "done"
"""The last sign of a process that leaves by itself."""


class Heartbeat:
    """The sign of life of one process, and the watch over the next."""

    def __init__(self, store: Any, rank: int, size: int, end: Callable[[str], object] | None = None) -> None:
        """`store` is one of torch.distributed, of which no other thread uses this client; `end` gets the message."""
        self._store, self._rank, self._watched = store, rank, (rank + 1) % size
        self._end = end or _end
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to give signs of life, and to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Say that this process leaves, and watch no longer."""
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
                    self._end(
                        f"process {self._watched} of this training has given no sign of life for {SILENCE:.0f} s, so "
                        f"process {self._rank} ends it; see that machine. The same command goes on from the last "
                        "checkpoint"
                    )
                    return
            self._store.set(_key(self._rank), DONE)
        except RuntimeError:  # the store is gone, and with it torchrun, which ends all processes unless it was killed
            return


def _key(rank: int) -> str:
    return f"mtkit/heartbeat/{rank}"


def _end(message: str) -> None:
    """At once: the main thread waits within an operation that nothing interrupts. torchrun then ends the others."""
    with suppress(AttributeError, OSError, ValueError):  # nobody may be there to read it
        sys.stderr.write(f"mtkit: {message}\n")
        sys.stderr.flush()
    os._exit(1)


PATIENCE = timedelta(hours=12)
"""How long processes wait for one another: checkpoints are the first one's work alone. The silent end before."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Read error", "Broken pipe")
"""What gloo says in a process when another has ended."""


class Closed(Protocol):
    """What is closed before the processes part."""

    def close(self) -> None: ...


class World:
    """The processes that train together; one alone where torchrun did not start several."""

    def __init__(self, device: str = "auto") -> None:
        """`device` is a name as `find_device` takes it; of several processes, each has the GPU of its local rank.

        Raises: MtkitError where there is no such device; RunError where a process has no GPU of its own.
        """
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1 and (device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())):
            local = int(os.environ.get("LOCAL_RANK", "0"))
            if local >= torch.cuda.device_count():
                raise RunError(f"process {local} has no GPU: this machine has {torch.cuda.device_count()}")
            device = f"cuda:{local}"
            torch.cuda.set_device(torch.device(device))  # before anything allocates, which is on the first GPU else
        self.device = find_device(device)
        self._closed: WeakSet[Closed] = WeakSet()

    def __enter__(self) -> Self:
        if self.size > 1:
            # The optimiser's first step imports torch._dynamo, and with it modules that keep the default group as a
            # default argument for ever. Then gloo's threads outlive the group, and one that lets go of a tensor while
            # the interpreter ends aborts the process. Imported before there is a group, they keep nothing.
            import_module("torch._dynamo")
            found, *_ = next(rendezvous("env://", self.rank, self.size))
            # torchrun starts all processes again where one has died or other machines have come: what the earlier ones
            # left in the store is past
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store: Any = PrefixStore(f"mtkit/{restart}/{self.size}", found)
            # decisions travel by gloo in CPU tensors, so that making one never waits for a GPU
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=PATIENCE)
            self._heartbeat = Heartbeat(store.clone(), self.rank, self.size)
            self._heartbeat.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.size == 1:
            return
        self._heartbeat.stop()
        for each in self._closed:
            each.close()
        dist.destroy_process_group()
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST):
            raise RunError(
                f"process {self.rank} lost the connection to another process of this training, which ended; see what "
                "that one said. The same command goes on from the last checkpoint"
            ) from error

    def close_at_end(self, each: Closed) -> None:
        """Close this, if it still exists, before the processes part.

        Objects of PyTorch's that hold the group from C++ need it. The last one to let go of the group waits for gloo's
        threads; these wait for Python's lock to let go of a tensor, and such an object holds the lock.
        """
        self._closed.add(each)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def agree(self, *values: float) -> list[float]:
        """The largest of each value over all processes: a wish to stop of any of them becomes everyone's.

        Without values, a place that no process leaves before all have come to it.
        """
        if self.size == 1:
            return list(values)
        together = torch.tensor([*values, 0.0], dtype=torch.float64)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        agreed: list[float] = together.tolist()
        return agreed[:-1]

    def sum(self, values: Tensor) -> None:
        """Replace values on the CPU by their sums over all processes."""
        if self.size > 1:
            dist.all_reduce(values)

    def share(self, of: int) -> range:
        """This process's share of so many items."""
        return range(self.rank, of, self.size)

    def gathered(self, mine: Any) -> list[Any] | None:
        """What each process gives, by rank, on the first process; None on the others. All is what JSON holds."""
        if self.size == 1:
            return [mine]
        content = torch.frombuffer(bytearray(json_text(mine).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]))
        longest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(content, (0, longest - len(content)))
        parts = [torch.empty_like(padded) for _ in sizes] if self.first else None
        dist.gather(padded, parts)
        if parts is None:
            return None
        return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]
