"""The position encodings of a model as tables and as a picture: lines over positions, and heat maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtkit.attention.positions import Alibi, Rotary, Shaw
from mtkit.attention.slots import Positions
from mtkit.errors import MtkitError
from mtkit.evaluation.pictures.document_positions import LINES as STYLES
from mtkit.evaluation.pictures.figures import LARGEST, save_figure
from mtkit.model.embedding import Learned, Sinusoidal
from mtkit.model.network import Network

LINES = (0.1, 0.2, 0.3, 0.5)
"""Dimensions drawn as lines by default, as shares of the width: waves of sinusoidal positions from short to long."""
ALL_LINES = 16
"""Maximum columns drawn as lines if they are heads."""
HEIGHT = 3.2
"""Height of one encoding in inches."""


@dataclass(frozen=True)
class Encoding:
    """One position encoding."""

    name: str
    """Its kind, and its place in the model."""
    table: Tensor
    """(positions or distances, columns), float32 on the CPU."""
    first: int
    """Position or distance of the first row."""
    rows: str
    """"position", or "distance j - i" of a key from its query."""
    columns: str
    """"dimension" or "head"."""


@torch.no_grad()
def encodings_of(network: Network, count: int) -> list[Encoding]:
    """Return the encodings of a model's first `count` positions: absolute ones, then relative ones by role and layer.

    Equal tables are listed once. Rotary positions are shown as they rotate a query of a 1 in the first channel of each
    pair: cosines and sines. ALiBi and Shaw's relative positions are shown by distance.

    Raises: MtkitError if the model has none.
    """
    encodings: list[tuple[str, str, Encoding]] = []  # kind, and place in the model
    for side, embedding in (("source", network.source_embedding), ("target", network.target_embedding)):
        module = embedding.positions
        if module is not None:
            kind = {Learned: "learned positions", Sinusoidal: "sinusoidal positions"}.get(type(module), "positions")
            table = module.table[:count]
            encodings.append((kind, side, Encoding(kind, table.detach().float().cpu(), 0, "position", "dimension")))
    layers: dict[str, int] = {}
    for _, attention in network.attentions():
        role = attention.site.role
        layers[role] = layers.get(role, 0) + 1
        slot = getattr(attention, "positions", None)
        if isinstance(slot, Positions):
            encodings += [(kind.name, f"{role} layer {layers[role]}", kind) for kind in _relative(slot, count)]
    if not encodings:
        raise MtkitError("this model has no position encodings (model.positions: none, and no positions= in attention)")
    return _joined(encodings)


def _relative(slot: Positions, count: int) -> list[Encoding]:
    """Return the tables of relative positions."""
    distance = torch.arange(count)
    if isinstance(slot, Rotary):
        row = torch.zeros(count, slot.width)
        ones = slice(0, slot.pairs) if slot.in_halves else slice(0, 2 * slot.pairs, 2)
        row[:, ones] = 1.0
        return [Encoding("rotary positions", slot.rotate(row, distance), 0, "position", "dimension")]
    if isinstance(slot, Alibi):
        query = torch.zeros(1, slot.site.heads, 1, slot.width)
        bias = slot.bias(query, torch.tensor([count - 1]), distance, 1.0)
        assert bias is not None
        return [Encoding("ALiBi bias", bias.reshape(-1, count).T, 1 - count, "distance j - i", "head")]
    if isinstance(slot, Shaw):
        tables = {"keys": slot.keys, "values": slot.value_table}
        return [
            Encoding(f"Shaw's relative {name}", table.detach().float().cpu(), -slot.clip, "distance j - i", "dimension")
            for name, table in tables.items()
        ]
    return []


def _joined(encodings: Sequence[tuple[str, str, Encoding]]) -> list[Encoding]:
    """Return each different table once, with the places of all that are equal."""
    groups: list[tuple[str, list[str], Encoding]] = []
    for kind, place, encoding in encodings:
        same = (
            group
            for group in groups
            if group[0] == kind and group[2].table.shape == encoding.table.shape
            if torch.equal(group[2].table, encoding.table)
        )
        group = next(same, None)
        if group is None:
            groups.append((kind, [place], encoding))
        else:
            group[1].append(place)
    return [
        Encoding(f"{kind}: {_places(places)}", one.table, one.first, one.rows, one.columns)
        for kind, places, one in groups
    ]


def _places(places: Sequence[str]) -> str:
    """Shorten "encoder layer 1", "encoder layer 2" to "encoder layers 1, 2"."""
    roles: dict[str, list[str]] = {}
    for place in places:
        role, _, layer = place.partition(" layer ")
        roles.setdefault(role, []).extend([layer] if layer else [])
    named = [
        role if not layers else f"{role} layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}"
        for role, layers in roles.items()
    ]
    return "; ".join(named) if any(roles.values()) else " and ".join(named)


def draw_positions(encodings: Sequence[Encoding], path: Path, dimensions: Sequence[int] = ()) -> None:
    """Draw each encoding as lines of some `dimensions` over positions, and as a heat map, as a PNG.

    By default the lines are four dimensions, or all heads. Repeated dimensions are drawn once.

    Raises: MtkitError for a dimension that an encoding does not have, for a picture that is too large, and if the file
    cannot be written.
    """
    from matplotlib.figure import Figure

    dimensions = list(dict.fromkeys(dimensions))
    for encoding in encodings:
        if encoding.columns == "dimension" and dimensions and max(dimensions) >= encoding.table.shape[1]:
            raise MtkitError(
                f"there is no dimension {max(dimensions)}: {encoding.name} has dimensions 0 to "
                f"{encoding.table.shape[1] - 1}"
            )
    if HEIGHT * len(encodings) > LARGEST:
        raise MtkitError(f"a picture of {len(encodings)} encodings is too large to draw")
    figure = Figure(figsize=(13, HEIGHT * len(encodings)), layout="constrained")
    grid = figure.subplots(len(encodings), 2, squeeze=False)
    for (lines, heat), encoding in zip(grid, encodings, strict=True):
        _draw_lines(lines, encoding, dimensions)
        image = _draw_heat(heat, encoding)
        figure.colorbar(image, ax=heat, fraction=0.04, pad=0.02).outline.set_visible(False)
    save_figure(figure, path)


def _draw_lines(axes: Any, encoding: Encoding, dimensions: Sequence[int]) -> None:
    count, width = encoding.table.shape
    if encoding.columns == "head":
        chosen: Sequence[int] = range(min(width, ALL_LINES))
    else:
        chosen = dimensions or sorted({min(int(share * width), width - 1) for share in LINES})
    places = range(encoding.first, encoding.first + count)
    for number, column in enumerate(chosen):
        name = f"head {column + 1}" if encoding.columns == "head" else f"dimension {column}"
        style = {"color": f"C{number % 10}", "linestyle": STYLES[number // 10 % len(STYLES)]}
        axes.plot(places, encoding.table[:, column].tolist(), label=name, linewidth=1.2, **style)
    left_out = encoding.columns == "head" and width > ALL_LINES
    axes.set_title(encoding.name + f" (first {ALL_LINES} of {width} heads)" * left_out, fontsize=10, loc="left")
    axes.set_xlabel(encoding.rows)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_heat(axes: Any, encoding: Encoding) -> Any:
    count, width = encoding.table.shape
    most = float(encoding.table.abs().max()) or 1.0
    first = 1 if encoding.columns == "head" else 0
    sides = (first - 0.5, first + width - 0.5, encoding.first + count - 0.5, encoding.first - 0.5)
    image = axes.imshow(
        encoding.table.numpy(),
        aspect="auto",
        cmap="RdBu_r",
        vmin=-most,
        vmax=most,
        extent=sides,
        interpolation="nearest",
    )
    axes.locator_params(integer=True)
    axes.set_xlabel(encoding.columns)
    axes.set_ylabel(encoding.rows)
    return image
