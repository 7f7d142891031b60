"""Text for people: messages, tables for the terminal and in Markdown, shortened lines, and progress bars."""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

Rows = Sequence[Sequence[str]]

Say = Callable[[str], object]
"""Function that prints one line for the user."""


def quiet(message: str) -> None:
    """Print nothing."""


def stderr_is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # None if the shell has closed it; an object without isatty; a closed file
        return False


def stdout_width() -> int | None:
    """Return the width of the terminal at standard output, in letters; None if the output is no terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, ValueError, OSError):  # None if the shell has closed it; an object without a file
        return None


def aligned(rows: Rows, *, left: Collection[int] = (0,), width: int | None = None) -> str:
    """Format a table as plain text, the first row as the head. Wide letters, such as Chinese ones, take two columns.

    Columns in `left`, counted from 0, are aligned to the left; the others, usually numbers, to the right. In a table
    wider than `width`, text and heads are wrapped between words, in the widest columns first. If that is not enough,
    further columns follow below, again with the first column.
    """
    if width is None:
        return _plain(rows, left)
    least = [_least_width(column, place in left) for place, column in enumerate(zip(*rows, strict=True))]
    groups: list[list[int]] = [[0]]
    for place in range(1, len(least)):
        if len(groups[-1]) > 1 and sum(least[column] + 2 for column in groups[-1]) + least[place] > width:
            groups.append([0])
        groups[-1].append(place)
    tables = []
    for group in groups:
        part = [[row[place] for place in group] for row in rows]
        wrapped_part = _wrapped(part, [least[place] for place in group], width)
        tables.append(_plain(wrapped_part, [number for number, place in enumerate(group) if place in left]))
    return "\n\n".join(tables)


def _plain(rows: Rows, left: Collection[int]) -> str:
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


def wrapped(text: str, width: int | None, *, indent: str = "") -> str:
    """Wrap each line of the text between words if it is wider than `width`; further lines begin with `indent`."""
    if width is None:
        return text
    return "\n".join(_wrap(line, max(width, len(indent) + 20), indent) for line in text.split("\n"))


def _wrap(text: str, width: int, indent: str = "") -> str:
    """Wrap a line of text; words are never divided."""
    lines = [""]
    for word in re.findall(" *[^ ]+", text):  # with the spaces before it; a no-break space is part of a word
        if lines[-1] and text_width(lines[-1] + word) > width:
            lines.append(indent + word.lstrip(" "))
        else:
            lines[-1] += word
    return "\n".join(lines)


def text_width(text: str) -> int:
    """Return the columns that a text takes in a terminal: two for a wide letter, none for a combining mark."""
    if text.isascii():
        return len(text)
    from wcwidth import wcswidth  # a requirement of tabulate[widechars]

    width = int(wcswidth(text))
    return width if width >= 0 else len(text)  # negative with control characters


def _least_width(column: Sequence[str], is_text: bool) -> int:
    """Return the width of the longest word in the head, and in the cells if they are text, else of the longest cell."""
    head, *cells = column
    words = [*head.split(), *(word for cell in cells for word in (cell.split() if is_text else [cell]))]
    return max(map(text_width, words), default=0)


def _wrapped(rows: Rows, least: Sequence[int], width: int) -> Rows:
    """Return the rows with line breaks that make the table at most `width` wide, if the `least` widths allow it."""
    widths = [max(map(text_width, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        free = [place for place, most in enumerate(widths) if most > least[place]]
        if not free:
            break
        widths[max(free, key=widths.__getitem__)] -= 1
    return [[_wrap(cell, most) for cell, most in zip(row, widths, strict=True)] for row in rows]


_ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that move the cursor, change colours or the direction of the line, or end it."""


def acts(text: str) -> bool:
    """Return whether a terminal would not print all characters of the text, but act on one, as a line end."""
    return _ACTING.search(text) is not None


def shortened(text: str, most: int = 200) -> str:
    """Return a text for one line of a terminal, with an ellipsis after `most` - 1 characters if it has over `most`.

    Characters on which the terminal would act are written as in Python, as \\x1b.
    """
    text = text if len(text) <= most else f"{text[: most - 1]}\u2026"
    return _ACTING.sub(lambda match: ascii(match[0])[1:-1], text)


def short(number: float, digits: int = 3, gap: str = "") -> str:
    """Format a number in about `digits` digits with a unit prefix after the gap: 950, 1.2k, 7.1M, 3G."""
    prefix = ""
    for larger in "kMGTP":
        if abs(float(f"{number:.{digits}g}")) < 1000:
            break
        prefix, number = f"{gap}{larger}", number / 1000
    return f"{number:.{digits}g}{prefix}"


def _sides(rows: Rows, left: Collection[int]) -> list[str]:
    return ["left" if column in left else "right" for column in range(len(rows[0]))]


class ProgressBar(Protocol):
    """Iterates over `items` and shows the progress; `total` may be unknown."""

    def __call__(self, items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]: ...


def silent(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
    """Iterate over `items` without showing progress."""
    return items
