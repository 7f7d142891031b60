"""A picture of an alignment: source pieces across, pieces of the translation down, the darker the more attended."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from mtkit.files import writing

CELL = 0.3
"""Width and height of a cell in inches."""
MORE_SCRIPTS = ("CJK", "Gothic", "Hei", "Ming", "Song", "Arabic", "Hebrew", "Devanagari", "Thai", "Unicode")
"""Parts of the names of fonts that have letters which matplotlib's own font lacks."""


def draw_alignment(
    source: Sequence[str], target: Sequence[str], weights: Sequence[Sequence[float]], path: Path
) -> bool:
    """Draw weights, T rows of S, beside their pieces as a PNG; False where a letter has no installed font.

    Raises: MtkitError where it cannot be written.
    """
    from matplotlib import font_manager
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    installed = {each.name for each in font_manager.fontManager.ttflist}
    families = ["DejaVu Sans", *sorted(name for name in installed if any(part in name for part in MORE_SCRIPTS))]
    figure = Figure(figsize=(1.6 + CELL * len(source), 1.6 + CELL * len(target)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
    axes.set_xticks(range(len(source)), source, rotation=90, fontfamily=families)
    axes.set_yticks(range(len(target)), target, fontfamily=families)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xticks([each + 0.5 for each in range(len(source) - 1)], minor=True)
    axes.set_yticks([each + 0.5 for each in range(len(target) - 1)], minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    with warnings.catch_warnings(record=True) as caught, writing(path) as temporary:
        warnings.simplefilter("always")
        FigureCanvasAgg(figure).print_png(str(temporary))
    return not any("missing from" in str(each.message) for each in caught)
