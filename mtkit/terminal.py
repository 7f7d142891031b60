"""The terminal that people watch, where there is one.

Text for people: tables of cells, for the terminal and in Markdown, and samples of long text.

A wide letter of a table, as of Chinese, takes two places.

How far long work is: what shows it to people, as whoever does the work calls it.
"""

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from tabulate import tabulate


def watched() -> bool:
    """Whether standard error is a terminal: not where it is closed, or an object that stands in for a file."""
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # None, as where the shell has closed it; no such method; a closed file
        return False


Rows = Sequence[Sequence[str]]


def aligned(rows: Rows, *, left: Collection[int] = (0,)) -> str:
    """The rows with their columns two spaces apart, the first row as the head.

    The columns in `left`, counted from 0, are aligned to the left, the others, as numbers are, to the right.
    """
    # the head is a row like the others: tabulate widens columns with heads
    text = tabulate(
        rows, tablefmt="plain", colalign=_sides(rows, left), disable_numparse=True, preserve_whitespace=True
    )
    return "\n".join(line.rstrip() for line in text.split("\n"))


def markdown(rows: Rows, *, left: Collection[int] = (0,)) -> str:
    """The rows as a table in Markdown, the first row as its head."""
    head, *cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    sides = _sides(rows, left)
    return tabulate(cells, headers=head, tablefmt="pipe", colalign=sides, headersalign=sides, disable_numparse=True)


def shortened(text: str, most: int = 200) -> str:
    """Return the text, or if it is longer than `most` characters, its beginning with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def _sides(rows: Rows, left: Collection[int]) -> list[str]:
    return ["left" if column in left else "right" for column in range(len(rows[0]))]


class ProgressBar(Protocol):
    """Goes through `items` and shows how far it is; `total` may be unknown."""

    def __call__(self, items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]: ...


def silent(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    """Show no progress: the items as they are."""
    return items
