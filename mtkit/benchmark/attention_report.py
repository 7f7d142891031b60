"""A benchmark for people, as tables, and for programs, as JSON."""

import platform
from dataclasses import asdict
from math import isfinite
from textwrap import indent
from typing import Any

import torch

from mtkit import __version__, tables
from mtkit.benchmark.attention import FORMS, METRICS, WORKS, Benchmark

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
    parts = [head, *(_section(benchmark, *each) for each in sections(benchmark))]
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


def hardware(device: torch.device) -> str:
    """ "cpu (x86_64), 2 threads", or the GPU's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}), {torch.get_num_threads()} thread(s)"


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


def aligned(rows: list[list[str]]) -> str:
    """The rows as an indented table of text: the first column to the left, numbers to the right."""
    return indent(tables.aligned(rows), "  ")
