"""Tasks that rearrange a sequence of symbols, or pick from it by position."""

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from mtkit.data.builtin.task import BuiltinTask, Option, Words

VOCABULARY = {"vocabulary": Option(26, "Number of symbols.", 2, 10_000)}


@cache
def symbols(size: int) -> list[str]:
    """Return that many symbols: a, b, ..., z, or numbers with leading zeros if there are more than 26."""
    if size <= 26:
        return [chr(ord("a") + index) for index in range(size)]
    return [f"{index:0{len(str(size - 1))}d}" for index in range(size)]


def draw(random_: random.Random, options: Mapping[str, Any], length: int) -> list[str]:
    """Draw `length` symbols of the vocabulary."""
    return random_.choices(symbols(options["vocabulary"]), k=length)


def copy(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """The target is the source."""
    source = draw(random_, options, length)
    return source, source


def reverse(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """The target is the source from its end to its beginning."""
    source = draw(random_, options, length)
    return source, source[::-1]


def sort(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """The target has the symbols of the source in alphabetical order."""
    source = draw(random_, options, length)
    return source, sorted(source)


def shift(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """The target is the source without its first `places` symbols, which follow at the end."""
    source = draw(random_, options, length)
    places = options["places"] % length
    return source, source[places:] + source[:places]


def nth(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """The source has positions from 1, in digits, then symbols; the target has the symbols at these positions."""
    sequence = draw(random_, options, length)
    positions = [random_.randint(1, length) for _ in range(options["queries"])]
    source = " , ".join(" ".join(str(position)) for position in positions).split()
    return [*source, ":", *sequence], [sequence[position - 1] for position in positions]


TASKS = (
    BuiltinTask("copy", "Repeat the source.", copy, (5, 20), "symbols", "every position, in order", VOCABULARY),
    BuiltinTask(
        "reverse",
        "Repeat the source from its end.",
        reverse,
        (5, 20),
        "symbols",
        "every position, against the order",
        VOCABULARY,
    ),
    BuiltinTask(
        "sort",
        "Repeat the symbols of the source in alphabetical order.",
        sort,
        (5, 20),
        "symbols",
        "comparison of content",
        VOCABULARY,
    ),
    BuiltinTask(
        "shift",
        "Move the first symbols to the end.",
        shift,
        (5, 20),
        "symbols",
        "relative positions",
        {**VOCABULARY, "places": Option(3, "Number of symbols that move.", 1, 10_000)},
    ),
    BuiltinTask(
        "nth",
        "Return the symbols at the positions that precede the sequence.",
        nth,
        (5, 20),
        "symbols",
        "absolute positions",
        {**VOCABULARY, "queries": Option(4, "Number of positions.", 1, 1_000)},
    ),
)
"""The tasks of this module."""
