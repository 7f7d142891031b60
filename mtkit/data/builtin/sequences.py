"""Tasks that rearrange a sequence of symbols."""

import random
from collections.abc import Mapping
from typing import Any

from mtkit.data.builtin.task import BuiltinTask, Option, Words

VOCABULARY = {"vocabulary": Option(26, "Number of symbols.", 2, 10_000)}


def symbols(options: Mapping[str, Any]) -> list[str]:
    """Return the symbols of a vocabulary: a to z, or numbers with leading zeros if there are more than 26."""
    size = options["vocabulary"]
    if size <= 26:
        return [chr(ord("a") + index) for index in range(size)]
    return [f"{index:0{len(str(size - 1))}d}" for index in range(size)]


def copy(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """Draw random symbols; the target is the source."""
    source = random_.choices(symbols(options), k=length)
    return source, source


def reverse(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """Draw random symbols; the target is the source from its end to its beginning."""
    source = random_.choices(symbols(options), k=length)
    return source, source[::-1]


TASKS = (
    BuiltinTask(
        "copy", "Repeat the source.", copy, (5, 20), "symbols", "access to every position, in order", VOCABULARY
    ),
    BuiltinTask(
        "reverse",
        "Repeat the source from its end to its beginning.",
        reverse,
        (5, 20),
        "symbols",
        "access to every position, against the order",
        VOCABULARY,
    ),
)
"""The tasks of this module."""
