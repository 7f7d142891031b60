"""Figures as PNG files: their limits of size, and fonts for the letters of all scripts."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtkit.storage.files import writing

LARGEST = 300.0
"""Maximum width and height in inches: matplotlib draws 100 pixels per inch, at most 65,536."""
MOST = 22_500.0
"""Maximum area in square inches: at 10,000 pixels of four bytes each, 900 MB."""
OWN_FONT = "DejaVu Sans"
"""The font that comes with matplotlib."""
BOXES = ("Last Resort", "LastResort")
"""Name parts of fonts that draw a box for every letter."""


def font_families(pieces: Sequence[str]) -> list[str]:
    """Return matplotlib's own font and, in order of name, installed fonts that cover the letters it lacks."""
    from matplotlib import font_manager

    families = [OWN_FONT]
    missing = set("".join(pieces))
    missing -= _letters(font_manager.findfont(OWN_FONT), missing)
    if missing:
        _add_new_fonts()
    for font in sorted(font_manager.fontManager.ttflist, key=lambda font: font.name):
        if not missing:
            break
        if font.name in families or any(part in font.name for part in BOXES) or not _letters(font.fname, missing):
            continue
        # matplotlib draws text in the regular font of a family, which may have fewer letters
        if covered := _letters(font_manager.findfont(font.name), missing):
            families.append(font.name)
            missing -= covered
    return families


def _add_new_fonts() -> None:
    """Add the fonts that were installed after matplotlib stored its font list, which it never updates."""
    from matplotlib import font_manager

    paths = {font.fname for font in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in paths:
            with suppress(Exception):  # a damaged font: matplotlib ignores any error of a font too
                font_manager.fontManager.addfont(path)


def _letters(path: str, letters: Iterable[str]) -> set[str]:
    """Return the letters that a font has; none if its file is missing or damaged."""
    from matplotlib.ft2font import FT2Font

    try:
        # not font_manager.get_font, which includes the letters of the fallback fonts
        font = FT2Font(path)
    except (OSError, RuntimeError):
        return set()
    return {letter for letter in letters if font.get_char_index(ord(letter))}


def save_figure(figure: Any, path: Path) -> bool:
    """Write a figure as a PNG. Return False if no installed font has some letter.

    Raises: MtkitError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with warnings.catch_warnings(record=True) as caught, writing(path) as temporary:
        warnings.simplefilter("always")
        FigureCanvasAgg(figure).print_png(str(temporary))
    return not any("missing from" in str(warning.message) for warning in caught)
