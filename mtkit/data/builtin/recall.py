"""Tasks that recall content: values by their keys, and symbols among noise."""

import math
import random
from collections.abc import Mapping
from itertools import chain
from typing import Any

from mtkit.data.builtin.sequences import symbols
from mtkit.data.builtin.task import BuiltinTask, Option, Words

QUERIES, NOISE = "|", "_"
"""The words before the queries, and between queries or symbols. Marks that end sentences would split long lines."""


def mqar(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """Multi-query associative recall (Arora et al., 2023, section 3 and appendix): pairs of a key and a value, then
    every key once as a query; the target has the values in the order of the queries.

    As in the paper's code, keys and values are different, and `length` x `slots` slots follow the pairs. The i-th
    drawn slot is the query of the i-th pair; slot s is drawn with a probability proportional to s^(power - 1), without
    replacement. The paper's decoder answers right after each query, from the same sequence; here the target answers.
    """
    half = options["vocabulary"] // 2
    keys, values = (random_.sample(range(half), length) for _ in range(2))
    slots = length * options["slots"]
    # the order of -log(u) / weight is that of draws without replacement (Efraimidis and Spirakis, 2006)
    times = [-math.log(1 - random_.random()) * slot ** (1 - options["power"]) for slot in range(1, slots + 1)]
    places = sorted(range(slots), key=times.__getitem__)[:length]
    pair_of = dict(zip(places, range(length), strict=True))
    width = len(str(half - 1))
    pairs = [(f"k{key:0{width}d}", f"v{value:0{width}d}") for key, value in zip(keys, values, strict=True)]
    queries = [pairs[pair_of[slot]][0] if slot in pair_of else NOISE for slot in range(slots)]
    return [*chain.from_iterable(pairs), QUERIES, *queries], [pairs[pair_of[slot]][1] for slot in sorted(places)]


def selective_copy(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """Selective copying (Gu and Dao, 2023, section 3.1): `content` symbols at random places among noise; the target has
    the symbols in order. A source shorter than `content` has no noise."""
    content = random_.choices(symbols(options["vocabulary"]), k=min(options["content"], length))
    source = [NOISE] * length
    for place, symbol in zip(sorted(random_.sample(range(length), len(content))), content, strict=True):
        source[place] = symbol
    return source, content


def _enough_keys(options: Mapping[str, Any], longest: int) -> str | None:
    if options["vocabulary"] // 2 >= longest:
        return None
    return (
        f"{longest:,} pairs of the longest side need as many keys and values: set data.task.options.vocabulary = "
        f"{2 * longest:,} or more, or a lower data.task.longest or data.task.longer"
    )


TASKS = (
    BuiltinTask(
        "mqar",
        "Return the values of keys, after a list of keys and values.",
        mqar,
        (4, 16),
        "pairs",
        "associative recall",
        {
            "vocabulary": Option(256, "Number of keys and values together.", 2, 20_000),
            "slots": Option(2, "Places for queries per pair; 1: queries without gaps.", 1, 100),
            "power": Option(0.01, "Exponent of the power law of the queries' places; 1: uniform.", 0.0, 1.0),
        },
        "Arora et al. 2023, arXiv 2312.04927 (Zoology)",
        _enough_keys,
    ),
    BuiltinTask(
        "selective-copy",
        "Repeat the symbols among noise.",
        selective_copy,
        (16, 64),
        "symbols",
        "selection by content",
        {
            "vocabulary": Option(16, "Number of symbols, without noise.", 2, 10_000),
            "content": Option(8, "Number of symbols to repeat.", 1, 10_000),
        },
        "Gu and Dao 2023, arXiv 2312.00752 (Mamba)",
    ),
)
"""The tasks of this module."""
