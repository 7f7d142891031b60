"""mtkit from Python."""

from mtkit.api.functions import load, prepare, score, train

__all__ = ["load", "prepare", "score", "train"]
