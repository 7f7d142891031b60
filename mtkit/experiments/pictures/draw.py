"""All pictures of a study: `draw_all`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mtkit.experiments.pictures.bars import draw_bars
from mtkit.experiments.pictures.canvas import save, styled
from mtkit.experiments.pictures.costs import COSTS, draw_cost
from mtkit.experiments.pictures.curves import draw_curves
from mtkit.experiments.pictures.points import Point
from mtkit.experiments.pictures.ranks import Ranks, draw_ranks
from mtkit.storage.files import inside
from mtkit.terminal import ProgressBar, silent

PICTURES = ("compare.png", "compare-curves.png", "compare-ranks.png", *(f"compare-{key}.png" for key in COSTS))
"""Names of the pictures."""


def draw_all(
    points: Sequence[Point],
    ranks: Ranks | None,
    folder: Path,
    *,
    metric: str = "BLEU",
    title: str = "Comparison",
    progress: ProgressBar = silent,
) -> list[Path]:
    """Draw the pictures for which there are measurements; return their paths. Earlier pictures of others are removed.

    `metric` is the quality of the points: "BLEU", "chrF", "TER", "exact" or "loss". The first point is the entry with
    which the others are compared.

    Raises: MtkitError if a file cannot be written; ModuleNotFoundError without matplotlib.
    """
    drawings: dict[str, Callable[[], Any]] = {
        "compare.png": lambda: draw_bars(points, metric, title),
        "compare-curves.png": lambda: draw_curves(points, metric, title),
        "compare-ranks.png": lambda: None if ranks is None else draw_ranks(ranks, title),
        **{f"compare-{key}.png": partial(draw_cost, points, key, metric, title) for key in COSTS},
    }
    paths = {name: inside(folder, name) for name in PICTURES}  # raises for a link before any work is done
    written = []
    with styled([title, *(point.name for point in points)]):
        for name in progress(PICTURES, "drawing", len(PICTURES)):
            figure = drawings[name]()
            if figure is None:
                paths[name].unlink(missing_ok=True)
            else:
                written.append(save(figure, paths[name]))
    return written
