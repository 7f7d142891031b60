"""Shared parts of the benchmarks' reports: output files, tables, bar charts, and the machine's measured rates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from pydantic_core import from_json

from mtkit import terminal
from mtkit.device import hardware
from mtkit.errors import MtkitError
from mtkit.evaluation.pictures.figures import save_figure
from mtkit.product_rate import Rate
from mtkit.storage.files import check_writable, inside, write_json, write_text
from mtkit.version import __version__

FORMAT = 1


@dataclass(frozen=True)
class Bars:
    """Bar chart of speeds, the first at the top."""

    title: str
    unit: str
    speeds: Sequence[tuple[str, float, bool]]
    """(label, speed, whether it is mtkit's)."""


def outputs(folder: Path, name: str) -> list[Path]:
    """The files of a report in a folder: table, JSON and picture.

    Raises: MtkitError if one is a link, cannot be written, or exists and was not written by mtkit, according to its
    JSON.
    """
    paths = [inside(folder, f"{name}{end}") for end in (".txt", ".json", ".png")]
    check_writable(paths[0])
    try:
        ours = "mtkit" in from_json(paths[1].read_bytes())
    except (OSError, ValueError, TypeError):
        ours = False
    if not ours and (foreign := [path for path in paths if path.exists()]):
        raise MtkitError(f"{foreign[0]} exists, and mtkit has no record that it wrote it; give another --output")
    return paths


def write(paths: Sequence[Path], text: str, content: Mapping[str, Any], draw: Callable[[Path], object]) -> str:
    """Write the `outputs`, the picture by `draw` if matplotlib is installed; return a line with their paths."""
    write_json(paths[1], dict(content))  # first: `outputs` recognises the files by it
    write_text(paths[0], text + "\n")
    try:
        draw(paths[2])
    except ModuleNotFoundError:
        return f"{paths[0]}, {paths[1]} (no picture: matplotlib is not installed)"
    return ", ".join(map(str, paths))


def draw(charts: Sequence[Bars], path: Path) -> None:
    """Draw the charts below one another, as a PNG. Raises: MtkitError if there are none, or for a failed write."""
    from matplotlib.figure import Figure

    if not charts:
        raise MtkitError("nothing was measured, so there is nothing to draw")
    heights = [0.9 + 0.36 * len(chart.speeds) for chart in charts]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    grid = figure.subplots(len(charts), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (axes,), chart in zip(grid, charts, strict=True):
        labels, speeds, ours = zip(*chart.speeds, strict=True)
        drawn = axes.barh(range(len(speeds)), speeds, color=["#1f77b4" if our else "#9a9a9a" for our in ours])
        axes.bar_label(drawn, [f"{speed:,.0f}" for speed in speeds], padding=4, fontsize="small")
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(speeds))
        axes.set_xlabel(chart.unit)
        axes.set_title(chart.title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def about(device: torch.device, rates: Mapping[str, Rate]) -> dict[str, Any]:
    """Return the head of each report's JSON: versions, hardware, and measured rates of matrix products."""
    return {
        "format": FORMAT,
        "mtkit": __version__,
        "torch": torch.__version__,
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "product_rates": {name: {"best": rate.best, "by_size": rate.by_size} for name, rate in rates.items()},
    }


def rates_in_words(rates: Mapping[str, Rate]) -> str:
    """Format a line for each arithmetic: its best rate, to which shares refer, and the rate of each size."""
    lines = []
    for name, rate in rates.items():
        sizes = ", ".join(f"{side:,}: {giga(speed)}" for side, speed in rate.by_size.items())
        lines.append(f"  {name} {giga(rate.best)} GFLOP/s ({sizes})")
    return "\n".join(["measured matrix products (by side of the squares):", *lines])


def giga(speed: float) -> str:
    """Format a speed in billions: "1,230" or "17.5"."""
    return f"{speed / 1e9:,.0f}" if speed >= 1e11 else f"{speed / 1e9:.3g}"


def times(speed: float, base: float) -> str:
    """Format "×1.31"."""
    return f"×{speed / base:.2f}"


def percent(share: float | None) -> str:
    """Format "43%", or a dash if unknown."""
    return "-" if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def aligned(rows: list[list[str]]) -> str:
    """The rows as an indented table of text: the first column to the left, numbers to the right."""
    return indent(terminal.aligned(rows), "  ")
