"""Tasks that count the symbols of a sequence."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mtkit.data.builtin.sequences import draw, symbols
from mtkit.data.builtin.task import BuiltinTask, Option, Words


def counting(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """The target has each symbol of the vocabulary with its number of occurrences, in digits."""
    source = draw(random_, options, length)
    counts = Counter(source)
    return source, [word for symbol in symbols(options["vocabulary"]) for word in (symbol, *str(counts[symbol]))]


def majority(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """The target is the most frequent symbol; sources without a single one are drawn again."""
    while True:
        source = draw(random_, options, length)
        first, *others = Counter(source).most_common(2)
        if not others or first[1] > others[0][1]:
            return source, [first[0]]


TASKS = (
    BuiltinTask(
        "counting",
        "Count each symbol.",
        counting,
        (10, 40),
        "symbols",
        "sums over all positions",
        {"vocabulary": Option(4, "Number of symbols.", 2, 26)},
        "Yehudai et al. 2024, arXiv 2407.15160",
    ),
    BuiltinTask(
        "majority",
        "Return the most frequent symbol.",
        majority,
        (10, 40),
        "symbols",
        "averages over all positions",
        {"vocabulary": Option(2, "Number of symbols.", 2, 26)},
        "Merrill et al. 2022, arXiv 2106.16213",
    ),
)
"""The tasks of this module."""
