"""Tasks with nested structure: brackets, and operators over lists."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mtkit.data.builtin.task import BuiltinTask, Option, Words

BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"), ("<", ">"))

OPERATORS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "[MAX": max,
    "[MIN": min,
    "[MED": lambda values: (sorted(values)[(len(values) - 1) // 2] + sorted(values)[len(values) // 2]) // 2,
    "[SM": lambda values: sum(values) % 10,
}
"""The operators of ListOps: maximum, minimum, median (of an even number, the mean of the middle two, rounded down), and
sum modulo 10."""

END = "]"


def dyck(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """A prefix of a word in the bounded Dyck language with `kinds` of brackets (Yao et al., 2021); the target has the
    only sequence of brackets that closes it. At least one bracket is open."""
    kinds, depth = BRACKETS[: options["kinds"]], options["depth"]
    while True:
        source, stack = list[str](), list[str]()
        for _ in range(length):
            if not stack or (len(stack) < depth and random_.random() < 0.5):
                opening, closing = random_.choice(kinds)
                source.append(opening)
                stack.append(closing)
            else:
                source.append(stack.pop())
        if stack:
            return source, stack[::-1]


class _Node:
    """A digit, or an operator with arguments."""

    def __init__(self, digit: int, depth: int) -> None:
        self.digit, self.depth = digit, depth
        """`depth` counts the operators around it."""
        self.operator: str | None = None
        self.arguments: list[_Node] = []

    def value(self) -> int:
        if self.operator is None:
            return self.digit
        return OPERATORS[self.operator]([node.value() for node in self.arguments])

    def words(self) -> Iterator[str]:
        if self.operator is None:
            yield str(self.digit)
            return
        yield self.operator
        for node in self.arguments:
            yield from node.words()
        yield END


def listops(random_: random.Random, options: Mapping[str, Any], length: int) -> tuple[Words, Words]:
    """An expression of exactly `length` words with nested operators (Nangia and Bowman, 2018); the target is its value.

    The paper draws trees of any length. Here a tree grows from a digit until it has the length: in random order, a
    digit becomes an operator with two digits, or an operator gets another digit.
    """
    while (root := _grow(random_, options, length)) is None:
        pass
    return list(root.words()), [str(root.value())]


def _grow(random_: random.Random, options: Mapping[str, Any], length: int) -> _Node | None:
    """Return a random tree, or None if it cannot grow to the length."""
    root = _Node(0, 0)
    digits, room = [root], list[_Node]()  # digits that may become operators; operators that may get arguments
    most, depth, names = options["arguments"], options["depth"], list(OPERATORS)

    def digit(below: int) -> _Node:
        node = _Node(random_.randrange(10), below)
        if below < depth:
            digits.append(node)
        return node

    words = 1
    while words < length:
        deepen = digits and words + 3 <= length and (not room or random_.random() < 0.5)
        if not deepen and not room:
            return None
        nodes = digits if deepen else room
        place = random_.randrange(len(nodes))
        node = nodes[place]
        nodes[place] = nodes[-1]
        nodes.pop()
        if deepen:
            node.operator = random_.choice(names)
            node.arguments = [digit(node.depth + 1), digit(node.depth + 1)]
        else:
            node.arguments.insert(random_.randint(0, len(node.arguments)), digit(node.depth + 1))
        if len(node.arguments) < most:
            room.append(node)
        words += 3 if deepen else 1
    return root


def _large_enough(options: Mapping[str, Any], longest: int) -> str | None:
    """Trees are drawn again if they cannot grow; a quarter of the largest size is reached at once."""
    size = 1
    for _ in range(options["depth"]):
        size = 2 + options["arguments"] * size
    if 4 * longest <= size:
        return None
    return (
        f"{longest:,} words do not fit easily in operators of {options['arguments']} arguments and depth "
        f"{options['depth']}: raise data.task.options.depth or arguments, or lower data.task.longest or longer"
    )


TASKS = (
    BuiltinTask(
        "dyck",
        "Close the brackets that are open.",
        dyck,
        (10, 40),
        "brackets",
        "a stack of bounded depth",
        {
            "kinds": Option(2, "Kinds of brackets.", 1, len(BRACKETS)),
            "depth": Option(8, "Maximum number of open brackets.", 2, 1_000),
        },
        "Yao et al. 2021, arXiv 2105.11115",
    ),
    BuiltinTask(
        "listops",
        "Compute nested maxima, minima, medians and sums modulo 10.",
        listops,
        (10, 40),
        "words",
        "nested look-up",
        {
            "depth": Option(5, "Maximum depth of operators.", 1, 50),
            "arguments": Option(5, "Maximum number of arguments of an operator.", 3, 100),
        },
        "Nangia and Bowman 2018, arXiv 1804.06028",
        _large_enough,
        minimum=4,
    ),
)
"""The tasks of this module."""
