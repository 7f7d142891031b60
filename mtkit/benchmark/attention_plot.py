"""Plot of a benchmark: time, peak memory and FLOPs over the length, a line for each mechanism."""

from pathlib import Path
from typing import Any

from mtkit.benchmark.attention import METRICS, Benchmark
from mtkit.benchmark.attention_report import TITLES, hardware, names, readable, works
from mtkit.files import writing

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#e377c2", "#8c564b", "#bcbd22", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LEAST_REACH = 6
"""Least factor from an axis's middle to its ends, so that noise does not look like growth."""


def draw_benchmark(benchmark: Benchmark, path: Path) -> None:
    """Draw the measurements as a PNG, both axes logarithmic: a row for each work and form, a column for each metric.

    Raises: MtkitError if it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
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
    with writing(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


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
