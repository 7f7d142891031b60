"""Segments of a task as lists of words."""

from mtkit.data.builtin.registry import builtin_sides
from mtkit.recipe.data import DataSettings

Pairs = list[tuple[list[str], list[str]]]


def pairs_of(name: str, side: str = "train", size: int = 500, **task: object) -> Pairs:
    """Draw segments of one side; `task` holds other settings of `data.task`."""
    sizes = {"train": size, "valid": 1, "test": 1} | ({} if side == "train" else {"test": size})
    data = DataSettings.model_validate({"task": {"name": name, **sizes, **task}})
    return [(pair.source.split(), pair.target.split()) for pair in builtin_sides(data)[side].draw()]
