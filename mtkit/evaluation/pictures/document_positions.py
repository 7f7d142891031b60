"""The picture of scores by position in the document."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import numpy as np

from mtkit.evaluation.document_positions import PositionRow
from mtkit.evaluation.pictures.figures import font_families, save_figure

MARKERS, LINES = "os^vD", ("-", "--", ":")
"""Markers and line styles: after ten systems, the colours are used again with the next ones."""
NAME_WIDTH = 90
"""Letters of a system's name that fit across the picture; a wide letter, such as a Chinese one, counts as two."""


def draw_by_position(tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[PositionRow]]]], path: Path) -> bool:
    """Draw the first score by position with its intervals as a PNG. Return False if no installed font has some letter.

    A side has a panel, and a system a line. `tables` are the title of each side, the names of the systems, which are
    the same for all sides, and their rows.

    Raises: MtkitError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    letter = 1 if all(map(str.isascii, tables[0][1])) else 2
    names = [fill(name, NAME_WIDTH // letter) for name in tables[0][1]]
    columns = min(len(names), max(1, NAME_WIDTH // (max(map(len, names)) * letter + 9)))
    legend_height = 0.2 * (sum(name.count("\n") + 1 for name in names) / columns + 1)
    figure = Figure(figsize=(8, 3.6 * len(tables) + legend_height), layout="constrained")
    families = font_families([*names, *(title for title, *_ in tables)])
    offset = min(0.08, 0.8 / len(names))
    for axes, (title, _, systems) in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
        lines = []
        for number, rows in enumerate(systems):
            metric = next(iter(rows[0].scores))
            values = [row.scores[metric] for row in rows]
            places = [place + offset * (number - (len(names) - 1) / 2) for place in range(len(rows))]
            below = [np.nan if row.low is None else max(row.scores[metric] - row.low, 0.0) for row in rows]
            above = [np.nan if row.high is None else max(row.high - row.scores[metric], 0.0) for row in rows]
            style = {
                "color": f"C{number % 10}",
                "marker": MARKERS[number // 10 % len(MARKERS)],
                "linestyle": LINES[number // 10 % len(LINES)],
            }
            lines.append(
                axes.errorbar(
                    places, values, yerr=[below, above], markersize=4, capsize=3, linewidth=1.2, elinewidth=0.8, **style
                )
            )
        labels = [f"{row.name}\n{row.segments:,}\n{row.documents:,}" for row in systems[0]]
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("line in the document; below, the number of such lines, and of documents that have them")
        axes.set_ylabel(f"{metric}, 95% interval over documents")
        axes.set_title(title, fontsize=9, loc="left", parse_math=False, fontfamily=families)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    legend = figure.legend(lines, [""] * len(names), loc="outside lower left", frameon=False, fontsize=9, ncols=columns)
    for text, name in zip(legend.get_texts(), names, strict=True):
        # not as a label: its dollar signs would start formulas, and a label with a leading _ is left out
        text.set(text=name, parse_math=False, fontfamily=families)
    return save_figure(figure, path)
