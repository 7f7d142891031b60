"""mtkit: translation models in which the attention mechanism is a choice."""

from typing import Any

__version__ = "0.1.0"

FUNCTIONS = ("load", "prepare", "train", "score")
"""The functions of `mtkit.api`, which are imported at first use: they bring PyTorch."""


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module 'mtkit' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module("mtkit.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *FUNCTIONS})
