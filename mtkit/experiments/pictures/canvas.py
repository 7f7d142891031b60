"""Common parts of all pictures: figures without a window system, fonts, colours, title and note, and the PNG file."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtkit.attention.registry import OTHERS
from mtkit.evaluation.pictures.figures import font_families
from mtkit.storage.files import writing
from mtkit.terminal import text_width, wrapped

DPI = 150
INK, FAINT = "#222222", "#8a8a8a"
"""Colours of the first entry and of text, and of whatever is in the background."""
MIXED = "several or none"
"""Name of the group for entries with several families or none."""
STYLES = {
    "scoring": ("#222222", "o"),
    "sparse": ("#ee7733", "s"),
    "content": ("#5e4b00", "D"),
    "linear": ("#332288", "^"),
    "lowrank": ("#ffb000", "v"),
    "compressed": ("#785ef0", "P"),
    "prior": ("#88ccee", "h"),
    "heads": ("#aa4499", "X"),
    OTHERS: ("#999999", "p"),
    MIXED: ("#ffffff", "o"),
}
"""Colour and marker by family, in the order of the survey.

Any two colours differ by at least 20 in CIELAB, also for dichromats, and the markers differ too."""
LONGEST = 44
"""Number of letters above which a name is shortened."""


def style_of(family: str | None) -> tuple[str, str]:
    """Return the colour and marker of a family; a family that mtkit lacks is drawn as another package's."""
    return STYLES.get(family or MIXED, STYLES[OTHERS])


@contextmanager
def styled(texts: Sequence[str]) -> Iterator[None]:
    """Set fonts that have the letters of the texts, and the style of the pictures, for the figures of the block."""
    import matplotlib as mpl

    options = {
        "font.family": font_families([*texts, "±≤←→↑↓…"]),
        "font.size": 9,
        "text.parse_math": False,  # a dollar sign in a name does not start a formula
        "text.color": INK,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.alpha": 0.3,
        "legend.frameon": False,
    }
    with mpl.rc_context(options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from.*")  # a letter of no font is drawn as a box
        yield


def new_figure(width: float, height: float) -> Any:
    """Return a figure of a size in inches, without pyplot: no window system, and no state shared with the caller."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def entitle(figure: Any, title: str, *notes: str) -> None:
    """Write the title above the picture, and the notes that are not empty below it."""
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12, fontweight="bold")
    if text := " ".join(filter(None, notes)):
        lines = wrapped(text, int(15 * figure.get_figwidth()))
        figure.supxlabel(lines, x=0.01, horizontalalignment="left", fontsize=8, color="#555555")


def save(figure: Any, path: Path) -> Path:
    """Write a figure as a PNG; return the path. Raises: MtkitError if the file cannot be written."""
    with writing(path) as temporary:
        figure.canvas.print_png(str(temporary))
    return path


def shortened(names: Iterable[str]) -> dict[str, str]:
    """Return each name in at most `LONGEST` letters, or in as many as are needed for different names to stay different.

    A wide letter, such as a Chinese one, counts as two. Both ends stay, because options and roles are at the end.
    """
    most, short = LONGEST, {name: _cut(name, LONGEST) for name in names}
    while len(set(short.values())) < len(short):
        most += 8
        short = {name: _cut(name, most) for name in short}
    return short


def _cut(name: str, most: int) -> str:
    if text_width(name) <= most:
        return name
    half = (most - 1) * len(name) // (2 * text_width(name))  # in letters
    return f"{name[:half]}…{name[-half:]}"
