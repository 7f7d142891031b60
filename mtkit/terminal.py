"""Text for people: tables for the terminal and in Markdown, shortened lines, and the interface of progress bars."""

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

Rows = Sequence[Sequence[str]]


def stderr_is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # None if the shell has closed it; an object without isatty; a closed file
        return False


def aligned(rows: Rows, *, left: Collection[int] = (0,)) -> str:
    """Format a table as plain text, the first row as the head. Wide letters, such as Chinese ones, take two columns.

    Columns in `left`, counted from 0, are aligned to the left; the others, usually numbers, to the right.
    """
    from tabulate import tabulate  # measures all characters at its import

    # the head is passed as a row, because tabulate makes columns with a head wider
    text = tabulate(
        rows, tablefmt="plain", colalign=_sides(rows, left), disable_numparse=True, preserve_whitespace=True
    )
    return "\n".join(line.rstrip() for line in text.split("\n"))


def markdown(rows: Rows, *, left: Collection[int] = (0,)) -> str:
    """Format a table in Markdown, the first row as the head."""
    from tabulate import tabulate

    head, *cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    sides = _sides(rows, left)
    return tabulate(cells, headers=head, tablefmt="pipe", colalign=sides, headersalign=sides, disable_numparse=True)


def shortened(text: str, most: int = 200) -> str:
    """Return the text, or if it is longer than `most` characters, its beginning with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def _sides(rows: Rows, left: Collection[int]) -> list[str]:
    return ["left" if column in left else "right" for column in range(len(rows[0]))]


class ProgressBar(Protocol):
    """Iterates over `items` and shows the progress; `total` may be unknown."""

    def __call__(self, items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]: ...


def silent(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    """Iterate over `items` without showing progress."""
    return items
