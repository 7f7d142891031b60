"""Plot of a benchmark: time, peak memory and FLOPs over the length, a line for each mechanism.

A benchmark for people, as tables, and for programs, as JSON.
"""

from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from mtkit.benchmark.attention import FORMS, METRICS, WORKS, Benchmark
from mtkit.benchmark.report import aligned
from mtkit.device import hardware
from mtkit.evaluation.pictures.figures import save_figure
from mtkit.version import __version__

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#e377c2", "#8c564b", "#bcbd22", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LEAST_REACH = 6
"""Least factor from an axis's middle to its ends, so that noise does not look like growth."""


def draw_benchmark(benchmark: Benchmark, path: Path) -> None:
    """Draw the measurements as a PNG, both axes logarithmic: a row for each work and form, a column for each metric.

    Raises: MtkitError if it cannot be written.
    """
    from matplotlib.figure import Figure

    rows = works(benchmark)
    # without pyplot: no window system, no state shared with the caller's own figures
    figure = Figure(figsize=(15, 0.7 + 3.6 * len(rows)), layout="constrained")
    setting = benchmark.setting
    figure.suptitle(
        f"attention as {setting.role}, batch {setting.batch}, "
        f"{setting.heads} heads of width {setting.width // setting.heads}, on {hardware(setting.device)}"
    )
    grid = figure.subplots(len(rows), len(METRICS), squeeze=False)
    for line, (work, form) in zip(grid, rows, strict=True):
        for axes, metric in zip(line, METRICS, strict=True):
            _draw(axes, benchmark, work, form, metric)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")
    save_figure(figure, path)


def _draw(axes: Any, benchmark: Benchmark, work: str, form: str, metric: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title(f"{TITLES[metric]}: {TITLES[work]},\n{TITLES[form]}", fontsize="medium")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for number, name in enumerate(names(benchmark)):
        rows = [row for row in benchmark.rows(name, work, form) if getattr(row, metric) > 0]
        full = name == "full"
        axes.plot(
            [row.length for row in rows],
            [getattr(row, metric) for row in rows],
            label=name,
            color="black" if full else COLORS[(number - 1) % len(COLORS)],
            marker=MARKERS[number // len(COLORS) % len(MARKERS)],
            markersize=4,
            linewidth=2.2 if full else 1.3,
            zorder=3 if full else 2,
        )
    measured = sorted({row.length for row in benchmark.measurements})
    axes.set_xticks(measured, [f"{length:,}" for length in measured])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    middle, reach = (low * high) ** 0.5, max((high / low) ** 0.5, LEAST_REACH)
    axes.set_ylim(middle / reach, middle * reach)
    axes.yaxis.set_major_locator(
        LogLocator(base=4, numticks=12) if metric == "peak_bytes" else LogLocator(base=10, subs=(1, 3), numticks=12)
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: readable(value, metric)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("length T")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


FORMAT = 1

TITLES = {
    "forward-backward": "forward and backward",
    "step": "one decoding step",
    "sub-layer": "whole sub-layer",
    "attention": "attention without its projections",
    "seconds": "time",
    "peak_bytes": "peak memory",
    "flops": "FLOPs",
}
SCALES: dict[str, list[tuple[float, str]]] = {
    "seconds": [(1, "s"), (1e-3, "ms"), (1e-6, "µs")],
    "peak_bytes": [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")],
    "flops": [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")],
}


def table(benchmark: Benchmark) -> str:
    """One table for each work, form and metric: a row a mechanism, a column a length, and the fitted exponent of T."""
    setting = benchmark.setting
    head = (
        f"{setting.role}, batch {setting.batch}, {setting.heads} heads of width {setting.width // setting.heads}, "
        f"{hardware(setting.device)}\n(×: how many times less than full; T^: fitted exponent of the length)"
    )
    parts = [head, *(_section(benchmark, *section) for section in sections(benchmark))]
    left_out = [*benchmark.skipped, *benchmark.failed]
    return "\n\n".join([*parts, *(["\n".join(left_out)] if left_out else [])])


def as_object(benchmark: Benchmark) -> dict[str, Any]:
    """Everything measured, numbers unrounded, with the ratios to `full` and the fitted exponents."""
    setting = {**asdict(benchmark.setting), "device": str(benchmark.setting.device)}
    return {
        "format": FORMAT,
        "mtkit": __version__,
        "torch": torch.__version__,
        "hardware": hardware(benchmark.setting.device),
        "setting": setting,
        "lengths": list(benchmark.lengths),
        "measurements": [
            {**asdict(row), "full_by_this": {metric: benchmark.ratio(row, metric) for metric in METRICS}}
            for row in benchmark.measurements
        ],
        "exponents": [
            {
                "attention": name,
                "work": work,
                "form": form,
                **{metric: benchmark.exponent(name, work, form, metric) for metric in METRICS},
            }
            for work, form in works(benchmark)
            for name in names(benchmark)
        ],
        "skipped": benchmark.skipped,
        "failed": benchmark.failed,
    }


def works(benchmark: Benchmark) -> list[tuple[str, str]]:
    """The works and forms that were measured, in their order."""
    measured = {(row.work, row.form) for row in benchmark.measurements}
    return [(work, form) for work in WORKS for form in FORMS if (work, form) in measured]


def sections(benchmark: Benchmark) -> list[tuple[str, str, str]]:
    """Each work and form with each metric."""
    return [(work, form, metric) for work, form in works(benchmark) for metric in METRICS]


def names(benchmark: Benchmark) -> list[str]:
    """The mechanisms in the order in which they were measured."""
    return list(dict.fromkeys(row.attention for row in benchmark.measurements))


def title(work: str, form: str, metric: str) -> str:
    """ "time of forward and backward, whole sub-layer"."""
    return f"{TITLES[metric]} of {TITLES[work]}, {TITLES[form]}"


def readable(value: float, metric: str) -> str:
    """ "12.3 ms": three digits and the unit that makes them short."""
    for size, unit in SCALES[metric]:
        if value >= size:
            return f"{value / size:.3g} {unit}" if value / size < 999.5 else f"{value / size:.0f} {unit}"
    size, unit = SCALES[metric][-1]
    return f"{value / size:.2g} {unit}" if value else "0"


def _section(benchmark: Benchmark, work: str, form: str, metric: str) -> str:
    rows = [["", *(f"{length:,}" for length in benchmark.lengths), "T^"]]
    for name in names(benchmark):
        cells = {row.length: _cell(benchmark.ratio(row, metric)) for row in benchmark.rows(name, work, form)}
        measured = {row.length: getattr(row, metric) for row in benchmark.rows(name, work, form)}
        exponent = benchmark.exponent(name, work, form, metric)
        rows.append(
            [
                name,
                *(
                    f"{readable(measured[length], metric)} {cells[length]}" if length in measured else "-"
                    for length in benchmark.lengths
                ),
                "-" if exponent is None else f"{exponent:.2f}",
            ]
        )
    return f"{title(work, form, metric)}\n{aligned(rows)}"


def _cell(ratio: float | None) -> str:
    if ratio is None or not isfinite(ratio):
        return f"{'×-':>6}"
    return f"{'×' + format(ratio, '.3g' if ratio < 1000 else ',.0f'):>6}"
