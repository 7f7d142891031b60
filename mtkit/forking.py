"""Safe forks of a process that has loaded a run.

The forked process has only the thread that forks. PyTorch would wait for OpenMP's threads forever, so it computes with
one thread there. A lock that another thread holds would stay locked, and a model that another thread uses would stay
half changed, so a fork waits until no run is in use.
"""

import os
import threading
from functools import cache
from typing import Any
from weakref import WeakSet

import torch

_turns: WeakSet[Any] = WeakSet()
_held: list[Any] = []
_fork = threading.RLock()


def new_turn() -> Any:
    """Return a `threading.RLock` to hold while a model is used. From now on, forks wait until it is free."""
    _register()
    turn = threading.RLock()
    _turns.add(turn)
    return turn


@cache
def _register() -> None:
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_begin_copy)


def _hold() -> None:
    _fork.acquire()
    for turn in list(_turns):
        turn.acquire()
        _held.append(turn)


def _release() -> None:
    while _held:
        _held.pop().release()
    _fork.release()


def _begin_copy() -> None:
    _release()
    torch.set_num_threads(1)
