"""The numbers of all heads as a table and as a picture with a panel for each quantity and role."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isnan, log10
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

from mtkit.attention.contract import ROLES
from mtkit.errors import MtkitError
from mtkit.evaluation.heads import Heads, LayerHeads
from mtkit.evaluation.pictures.figures import LARGEST, font_families, save_figure
from mtkit.terminal import aligned, stdout_width

CELL_WIDTH, CELL_HEIGHT = 0.42, 0.28
"""Size of a head in a panel, in inches."""
ROW_HEIGHT = 0.11
"""Height of a head's row in a panel of several numbers per head, in inches."""
PANEL_WIDTH = 3.2
"""Least width of a panel, in inches."""
LETTER_WIDTH, LABEL_WIDTH = 0.055, 0.6
"""Inches per letter of a panel label, and the least inches of a label."""
TITLE_LETTER = 0.09
"""Inches per letter of the title; a wide letter, such as a Chinese one, counts as two."""
FEW = 4
"""Numbers per head up to which the table lists them all."""

MEASURED = {
    "cost": "cost of switching it off (nats)",
    "entropy": "entropy of weights (nats)",
    "distance": "distance attended to (pieces)",
}
"""Titles of the measured quantities, by their field of `LayerHeads`."""


def heads_table(heads: Heads) -> str:
    """Return a table with a row for each head; several numbers of a head are shortened to their range."""
    measured = [name for name in MEASURED if any(getattr(layer, name) is not None for layer in heads.layers)]
    learned = list(dict.fromkeys(name for layer in heads.layers for name in layer.learned))
    rows = [("role", "layer", "mechanism", "head", *measured, *learned)]
    for layer in heads.layers:
        for head in range(_rows_of(layer)):
            cells = [_cell(getattr(layer, name), head, layer, name) for name in measured]
            cells += [_cell(layer.learned.get(name), head, layer, name) for name in learned]
            rows.append((layer.role, str(layer.layer), layer.mechanism, str(head + 1), *cells))
    return aligned(rows, left=(0, 2), width=stdout_width())


def _rows_of(layer: LayerHeads) -> int:
    """Return the largest number of rows that any quantity of the layer has."""
    values = [layer.entropy, layer.cost, *layer.learned.values()]
    return max([layer.heads, *(len(value) for value in values if value is not None)])


def _cell(value: Tensor | None, head: int, layer: LayerHeads, name: str) -> str:
    if value is None or (len(value) > 1 and head >= len(value)):
        return ""
    index = head if len(value) > 1 else 0
    number = value[index]
    if torch.isnan(number).any():
        return ""
    if number.dim() == 0:
        error = f" ± {float(layer.cost_error[index]):.4f}" if name == "cost" and layer.cost_error is not None else ""
        return f"{float(number):.4f}{error}" if name == "cost" else f"{float(number):.3g}"
    if len(number) <= FEW:
        return " ".join(f"{value:.2g}" for value in number.tolist())
    return f"{float(number.min()):.2g} to {float(number.max()):.2g}"


@dataclass(frozen=True)
class _Panels:
    """One row of panels: one quantity in the roles that have it."""

    title: str
    by_role: dict[str, list[tuple[LayerHeads, Tensor]]]
    centred: bool
    """Whether colours are centred at 0."""

    @property
    def vectors(self) -> bool:
        """Whether there are several numbers per head."""
        return any(value.dim() == 2 for values in self.by_role.values() for _, value in values)

    @property
    def limits(self) -> tuple[float, float]:
        """The numbers of the first and last colour."""
        values = torch.cat([value.flatten() for values in self.by_role.values() for _, value in values])
        values = values[values.isfinite()]
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        if self.centred or low < 0 < high:
            most = max(-low, high) or 1.0
            return -most, most
        if self.vectors and low < high:
            return low, high
        return (min(low, 0.0), max(high, 0.0)) if low or high else (0.0, 1.0)

    @property
    def height(self) -> float:
        """Height of the tallest panel in inches, without title and ticks."""
        stacks = self.by_role.values()
        if self.vectors:
            rows = [sum(int((~value.isnan().all(1)).sum()) for _, value in stack) for stack in stacks]
            return max(0.4, max(rows) * ROW_HEIGHT)
        return max(len(stack) for stack in stacks) * CELL_HEIGHT


def _panels(heads: Heads) -> list[_Panels]:
    panels = []
    learned = dict.fromkeys(name for layer in heads.layers for name in layer.learned)
    for name in [*MEASURED, *learned]:
        by_role: dict[str, list[tuple[LayerHeads, Tensor]]] = {}
        for layer in heads.layers:
            value = getattr(layer, name) if name in MEASURED else layer.learned.get(name)
            if value is not None:
                by_role.setdefault(layer.role, []).append((layer, value))
        if by_role:
            panels.append(_Panels(MEASURED.get(name, name), by_role, centred=name == "cost"))
    return sorted(panels, key=lambda panel: panel.vectors)


def draw_heads(heads: Heads, title: str, path: Path) -> bool:
    """Draw the numbers of all heads as a PNG. Return False if no installed font has some letter of the title.

    Each quantity has a row of panels, and each role a column. In a panel of one number per head, a row is a layer and a
    column a head. In a panel of several numbers per head, a row is a head, and the numbers go across.

    Raises: MtkitError if there is nothing to draw, the picture is too large, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    panels = _panels(heads)
    if not panels:
        raise MtkitError(
            "there is nothing to draw: the mechanisms have no learned numbers, and no head was measured; "
            "raise --segments, or leave --no-costs out"
        )
    roles = [role for role in ROLES if any(role in panel.by_role for panel in panels)]
    most = max(_rows_of(layer) for layer in heads.layers)
    widths, heights = max(PANEL_WIDTH, most * CELL_WIDTH), [panel.height for panel in panels]
    labels = [max(len(_label(layer)) for layer in heads.layers if layer.role == role) for role in roles]
    label_widths = sum(max(LABEL_WIDTH, length * LETTER_WIDTH) for length in labels)
    width = 0.9 + len(roles) * widths + label_widths
    letters = int(width / (TITLE_LETTER if title.isascii() else 2 * TITLE_LETTER))
    if any(panel.centred for panel in panels):
        title += "\ncosts in brackets are within two standard errors of 0"
    title = "\n".join(fill(line, letters) for line in title.split("\n"))
    size = (width, 0.3 + 0.15 * (title.count("\n") + 1) + sum(height + 0.85 for height in heights))
    if max(size) > LARGEST:
        raise MtkitError(f"a picture of {size[0]:.0f} x {size[1]:.0f} inches is too large to draw; use --json")
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False, fontfamily=font_families([title]))
    grid = figure.subplots(len(panels), len(roles), squeeze=False, height_ratios=[height + 0.5 for height in heights])
    for row, panel in zip(grid, panels, strict=True):
        images = []
        for axes, role in zip(row, roles, strict=True):
            if role not in panel.by_role:
                axes.axis("off")
                continue
            draw = _draw_vectors if panel.vectors else _draw_scalars
            images.append(draw(axes, panel, panel.by_role[role]))
            axes.set_title(role, fontsize=8, loc="right", color="#555555")
            axes.tick_params(length=0, labelsize=7)
        first = next(axes for axes, role in zip(row, roles, strict=True) if role in panel.by_role)
        first.set_title(panel.title, fontsize=9, loc="left")
        bar = figure.colorbar(images[-1], ax=list(row), fraction=0.02, pad=0.01, aspect=12)
        bar.ax.tick_params(labelsize=6)
        bar.outline.set_visible(False)
    return save_figure(figure, path)


def _label(layer: LayerHeads) -> str:
    return f"{layer.layer} {layer.mechanism}"


def _colours(panel: _Panels) -> dict[str, Any]:
    low, high = panel.limits
    return {"cmap": "RdBu_r" if low < 0 < high else "Blues" if high > 0 else "Blues_r", "vmin": low, "vmax": high}


def _draw_scalars(axes: Any, panel: _Panels, stack: Sequence[tuple[LayerHeads, Tensor]]) -> Any:
    """Draw the numbers (layers, heads) as a heat map with numbers in its cells."""
    count = max(max(len(value), layer.heads) for layer, value in stack)
    table = torch.full((len(stack), count), float("nan"))
    for row, (layer, value) in enumerate(stack):
        shared = value if len(value) > 1 else value.expand(layer.heads)
        table[row, : len(shared)] = shared
    image = axes.imshow(table.tolist(), aspect="auto", **_colours(panel))
    axes.set_xticks(range(count), [str(head + 1) for head in range(count)])
    axes.set_yticks(range(len(stack)), [_label(layer) for layer, _ in stack])
    axes.set_xlabel("head", fontsize=7)
    axes.spines[:].set_visible(False)
    digits = _digits(panel)
    for row, (layer, _) in enumerate(stack):
        for head, number in enumerate(table[row].tolist()):
            if not isnan(number):
                light = sum(image.cmap(image.norm(number))[:3]) > 1.6
                text = f"{number:.{digits}f}"
                if panel.centred and _is_noise(layer, head, number):
                    text = f"({text})"
                axes.text(head, row, text, ha="center", va="center", fontsize=6.5, color="black" if light else "white")
    return image


def _draw_vectors(axes: Any, panel: _Panels, stack: Sequence[tuple[LayerHeads, Tensor]]) -> Any:
    """Draw the numbers of each head as a row of a heat map, the heads of a layer together."""
    count = max(value.shape[-1] for _, value in stack)
    first = -(count // 2) if panel.title.endswith("by distance") else 1
    rows, names, ends = [], [], []
    for layer, value in stack:
        for head, numbers in enumerate(value):
            if numbers.isnan().all():
                continue
            row = torch.full((count,), float("nan"))
            start = (count - len(numbers)) // 2 if first < 1 else 0  # the middle is distance 0
            row[start : start + len(numbers)] = numbers
            rows.append(row.tolist())
            names.append(f"{layer.layer}.{head + 1}" if len(value) > 1 else f"{layer.layer}")
        ends.append(len(rows))
    image = axes.imshow(rows, aspect="auto", interpolation="nearest", **_colours(panel))
    axes.set_yticks(range(len(rows)), names, fontsize=6)
    step = -(-count // 12)
    places = range(-first % step if first < 1 else 0, count, step)  # distance 0 has a mark
    axes.set_xticks(list(places), [str(first + place) for place in places])
    axes.set_xlabel("distance j - i" if first < 1 else "number", fontsize=7)
    axes.set_ylabel("layer.head", fontsize=7)
    axes.spines[:].set_visible(False)
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color="black", linewidth=0.6)
    return image


def _digits(panel: _Panels) -> int:
    """Return the decimals that leave three significant digits in the largest number, at most three."""
    most = max(abs(limit) for limit in panel.limits)
    return min(3, max(0, 2 - floor(log10(most)))) if most else 2


def _is_noise(layer: LayerHeads, head: int, cost: float) -> bool:
    return layer.cost_error is not None and abs(cost) <= 2 * float(layer.cost_error[head])
