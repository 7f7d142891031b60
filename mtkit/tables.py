"""Text for people: tables of cells, for the terminal and in Markdown, and samples of long text.

A wide letter of a table, as of Chinese, takes two places.
"""

from collections.abc import Collection, Sequence

from tabulate import tabulate

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
