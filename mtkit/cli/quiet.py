"""A word of warning before anything is timed."""

import os

from mtkit.cli.translation import note


def say_if_busy() -> None:
    """Say on standard error that other processes slow down what is measured, where they do.

    The processes of torchrun count each other, and say nothing.
    """
    import torch

    from mtkit.benchmark.machine import busy_note

    if "WORLD_SIZE" not in os.environ and (message := busy_note(torch.get_num_threads())):
        note(message)
