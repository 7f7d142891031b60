"""Plot of a training: loss, validation score, learning rate and gradient norm by update.

Plots of attention weights: keys on the x axis, queries on the y axis, darker for larger weights.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from mtkit.errors import MtkitError
from mtkit.storage.files import writing

Rows = Sequence[Mapping[str, Any]]
"""Lines of a metrics.jsonl: {"kind": "train" or "validation", "update": ..., and the measurements}."""

TRAINING, VALIDATION, RATE, NORM = "#1f77b4", "#d62728", "#2ca02c", "#8c8c8c"

SHOWN = {"bleu": "BLEU", "chrf": "chrF", "exact": "exact match", "token": "token match", "ter": "TER"}
"""Names of the plotted validation scores, by their key in metrics.jsonl."""


def draw_curves(rows: Rows, path: Path) -> None:
    """Draw the metrics as a PNG: losses (left), validation score (middle), learning rate and gradient norm (right).

    The validation score is the score that selects the best checkpoint, or BLEU if the loss selects it. Scores with
    different signatures are not comparable, so each signature has its own line.

    Raises: MtkitError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    # without pyplot: no window system, and no state shared with the caller's figures
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    losses, scores, rates = figure.subplots(1, 3)
    _losses(losses, rows)
    _scores(scores, rows)
    _rates(rates, rows)
    for axes in (losses, scores, rates):
        axes.set_xlabel("update")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _losses(axes: Any, rows: Rows) -> None:
    axes.set_title("loss in nats per target token")
    _line(axes, _series(rows, "train", "nll"), color=TRAINING, label="training, with dropout")
    updates, values = _series(rows, "validation", "nll")
    axes.plot(updates, values, color=VALIDATION, marker="o", markersize=3, label="validation")
    if values:
        axes.annotate(f"{values[-1]:.2f}", (updates[-1], values[-1]), xytext=(3, 6), textcoords="offset points")
    axes.legend(frameon=False)


def score_lines(rows: Rows, measure: str) -> list[tuple[str, list[tuple[int, float]]]]:
    """Return the validation scores of a measure in `SHOWN` as lines of (update, score) points, with their signatures.

    A new line begins whenever the signature changes; the last line has the current signature.
    """
    lines: list[tuple[str, list[tuple[int, float]]]] = []
    for row in rows:
        if row.get("kind") == "validation" and row.get(measure) is not None:
            signature = row.get("signature" if measure == "bleu" else f"{measure}_signature", "")
            if not lines or lines[-1][0] != signature:
                lines.append((signature, []))
            lines[-1][1].append((row["update"], row[measure]))
    return lines


def _scores(axes: Any, rows: Rows) -> None:
    chosen = [row.get("best_by", "bleu") for row in rows if row.get("kind") == "validation"][-1:]
    measure = chosen[0] if chosen and chosen[0] in SHOWN else "bleu"
    axes.set_title(f"validation {SHOWN[measure]}")
    lines = score_lines(rows, measure)
    for number, (signature, points) in enumerate(lines, start=1):
        shade = 1.0 if number == len(lines) else 0.4
        axes.plot(*zip(*points, strict=True), color=VALIDATION, alpha=shade, marker="o", markersize=3, label=signature)
    axes.set_ylim(bottom=0)
    if lines:
        update, best = (min if measure == "ter" else max)(lines[-1][1], key=itemgetter(1))
        axes.axhline(best, color=VALIDATION, linewidth=0.8, linestyle=":")
        axes.set_title(f"validation {SHOWN[measure]}, best {best:.1f} at update {update}")
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize="small")


def _rates(axes: Any, rows: Rows) -> None:
    axes.set_title("learning rate and gradient norm")
    line = _line(axes, _series(rows, "train", "rate"), color=RATE, label="learning rate (left)")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    other = axes.twinx()
    norms = _series(rows, "train", "gradient_norm")
    norm = _line(other, norms, color=NORM, linewidth=0.8, label="gradient norm (right)")
    other.set_ylim(bottom=0)
    other.spines["top"].set_visible(False)
    axes.legend(handles=[line, norm], frameon=False)


def _line(axes: Any, series: tuple[list[int], list[float]], **style: Any) -> Any:
    """Plot a line; a single point gets a marker, because a line would not show it."""
    (line,) = axes.plot(*series, marker="o" if len(series[0]) == 1 else None, markersize=3, **style)
    return line


def _series(rows: Rows, kind: str, name: str) -> tuple[list[int], list[float]]:
    """Return the updates and values of one measurement."""
    points = [(row["update"], row[name]) for row in rows if row.get("kind") == kind and row.get(name) is not None]
    return [update for update, _ in points], [value for _, value in points]


if TYPE_CHECKING:
    from mtkit.decoding.alignment import Alignment
    from mtkit.decoding.output_steps import Step

CELL = 0.3
"""Cell width and height in inches."""
SMALL_CELL = 0.16
"""Cell width and height in a plot of all layers and heads, in inches."""
STEP_WIDTH, STEP_HEIGHT = 0.95, 0.42
"""Cell width and height in a plot of output distributions, in inches."""
PIECE_WIDTH = 12
"""Letters that fit into such a cell; a wide letter, such as a Chinese one, counts as two."""
LARGEST = 300.0
"""Maximum width and height in inches: matplotlib draws 100 pixels per inch, at most 65,536."""
MOST = 22_500.0
"""Maximum area in square inches: at 10,000 pixels of four bytes each, 900 MB."""
OWN_FONT = "DejaVu Sans"
"""The font that comes with matplotlib."""
BOXES = ("Last Resort", "LastResort")
"""Name parts of fonts that draw a box for every letter."""


def draw_alignment(
    source: Sequence[str], target: Sequence[str], weights: Sequence[Sequence[float]], path: Path
) -> bool:
    """Draw weights (T, S) with their pieces as a PNG. Return False if no installed font has some letter.

    Raises: MtkitError if the file cannot be written or is too large to draw.
    """
    from matplotlib.figure import Figure

    size = (1.6 + CELL * len(source), 1.6 + CELL * len(target))
    if max(size) > LARGEST or size[0] * size[1] > MOST:
        raise MtkitError(f"a picture of {len(source)} x {len(target)} pieces is too large to draw; give a shorter text")
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    _draw_map(axes, source, target, weights, 10, font_families([*source, *target]))
    return save_figure(figure, path)


def draw_attention(aligned: "Alignment", path: Path) -> bool:
    """Draw the weights of every layer and head as a PNG. Return False if no installed font has some letter.

    A row shows the heads of a layer: first the cross attention, then the encoder and the decoder. Layers without
    weights are left out.

    Raises: MtkitError if the file cannot be written or is too large to draw.
    """
    from matplotlib.figure import Figure

    sides = {
        "cross": (aligned.source, aligned.target),
        "encoder": (aligned.source, aligned.source),
        "decoder": (aligned.read, aligned.target),
    }
    maps = [
        (role, layer, weights)
        for role in sides
        for layer, weights in enumerate(aligned.layers.get(role, []), start=1)
        if weights is not None
    ]
    heads = max(len(weights) for *_, weights in maps)
    widest, tallest = max(len(across) for across, _ in sides.values()), max(len(down) for _, down in sides.values())
    size = (heads * (1.2 + SMALL_CELL * widest), len(maps) * (1.4 + SMALL_CELL * tallest))
    if max(size) > LARGEST or size[0] * size[1] > MOST:
        raise MtkitError(
            f"a picture of {len(maps)} layers of up to {heads} heads over {widest} x {tallest} pieces is too large to "
            "draw; give a shorter text"
        )
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(maps), heads, squeeze=False)
    families = font_families([piece for pieces in sides.values() for side in pieces for piece in side])
    for row, (role, layer, weights) in zip(grid, maps, strict=True):
        across, down = sides[role]
        for head, axes in enumerate(row):
            if head < len(weights):
                _draw_map(axes, across, down, weights[head].tolist(), 6, families)
                axes.set_xlabel(f"{role}, layer {layer}, head {head + 1}", fontsize=8)
            else:
                axes.axis("off")
    return save_figure(figure, path)


def draw_steps(steps: "Sequence[Step]", path: Path) -> bool:
    """Draw the likeliest pieces of each step as a PNG. Return False if no installed font has some letter.

    A column is a step, below the piece of the translation; a cell has a piece and its probability, and the piece of the
    translation has a frame. The last row is the probability of all other pieces.

    Raises: MtkitError if the file cannot be written or is too large to draw.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    ranks = max(len(step.top) for step in steps)
    size = (1.2 + STEP_WIDTH * len(steps), 1.6 + STEP_HEIGHT * (ranks + 1))
    if max(size) > LARGEST:
        raise MtkitError(f"a picture of {len(steps)} pieces is too large to draw; give a shorter text")
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    columns = [[value for _, value in step.top] for step in steps]
    rest = [max(0.0, 1.0 - sum(column)) for column in columns]
    table = [[column[rank] for column in columns] for rank in range(ranks)] + [rest]
    axes.imshow(table, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    families = font_families([piece for step in steps for piece in (step.piece, *(name for name, _ in step.top))])
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "fontfamily": families, "parse_math": False}
    for place, (step, other) in enumerate(zip(steps, rest, strict=True)):
        cells = [*((f"{_short(name)}\n{value:.2f}", value) for name, value in step.top), (f"{other:.2f}", other)]
        for rank, (text, value) in enumerate(cells):
            axes.text(place, rank, text, color="white" if value > 0.55 else "black", **style)
        names = [name for name, _ in step.top]
        if step.piece in names:
            corner = (place - 0.48, names.index(step.piece) - 0.48)
            axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, edgecolor=VALIDATION, linewidth=1.5))
    heads = [_short(step.piece) + f"\n(rank {step.rank})" * (step.rank > ranks) for step in steps]
    axes.set_xticks(range(len(steps)), heads, fontfamily=families, parse_math=False)
    axes.set_yticks(range(ranks + 1), [*(str(rank) for rank in range(1, ranks + 1)), "others"])
    axes.set_ylabel("rank")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return save_figure(figure, path)


def _short(piece: str) -> str:
    """Return the piece, or its beginning with an ellipsis if it is wider than a cell."""
    widths = accumulate(2 if east_asian_width(letter) in "WF" else 1 for letter in piece)
    fits = sum(width <= PIECE_WIDTH for width in widths)
    return piece if fits == len(piece) else f"{piece[: fits - 1]}\u2026"


def _draw_map(
    axes: Any,
    across: Sequence[str],
    down: Sequence[str],
    weights: Sequence[Sequence[float]],
    size: int,
    families: Sequence[str],
) -> None:
    """Draw one map, with letters of `size` points from the font `families`."""
    axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
    # parse_math: a dollar sign in a piece does not start a formula
    axes.set_xticks(range(len(across)), across, rotation=90, fontfamily=families, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(down)), down, fontfamily=families, fontsize=size, parse_math=False)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xticks([place + 0.5 for place in range(len(across) - 1)], minor=True)
    axes.set_yticks([place + 0.5 for place in range(len(down) - 1)], minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.6)
    axes.tick_params(which="minor", length=0)


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
