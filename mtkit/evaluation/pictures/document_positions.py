"""The picture of scores by position in the document."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mtkit.evaluation.document_positions import PositionRow
from mtkit.evaluation.pictures.figures import save_figure


def draw_by_position(tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[PositionRow]]]], path: Path) -> None:
    """Draw the first score by position with its intervals as a PNG: a panel per side, a line per system.

    `tables` are the title of each side, the names of the systems and their rows.

    Raises: MtkitError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6 * len(tables)), layout="constrained")
    for axes, (title, names, systems) in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
        for number, (name, rows) in enumerate(zip(names, systems, strict=True)):
            metric = next(iter(rows[0].scores))
            values = [row.scores[metric] for row in rows]
            places = [place + 0.08 * (number - (len(names) - 1) / 2) for place in range(len(rows))]
            below = [np.nan if row.low is None else max(row.scores[metric] - row.low, 0.0) for row in rows]
            above = [np.nan if row.high is None else max(row.high - row.scores[metric], 0.0) for row in rows]
            axes.errorbar(
                places, values, yerr=[below, above], marker="o", markersize=4, capsize=3, linewidth=1.2, label=name
            )
        labels = [f"{row.name}\n{row.segments:,}\n{row.documents:,}" for row in systems[0]]
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("line in the document; below, the number of such lines, and of documents that have them")
        axes.set_ylabel(f"{metric}, 95% interval over documents")
        axes.set_title(title, fontsize=9, loc="left", parse_math=False)
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
