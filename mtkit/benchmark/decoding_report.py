"""The benchmark of decoding for people, as tables and bars, and for programs, as JSON."""

from dataclasses import asdict
from typing import Any

from mtkit.benchmark.attention_report import aligned, hardware
from mtkit.benchmark.decoding import DecodingBenchmark, Measured
from mtkit.benchmark.report import Bars, about, giga, percent, rates_in_words, times

AGREEMENT = 0.95
"""Share of lines that another program must translate as mtkit does, in float32 and greedily, to have the same model."""


def table(benchmark: DecodingBenchmark) -> str:
    """A table for each beam, with a row for each program and arithmetic; × is beside mtkit's first arithmetic."""
    side, first = benchmark.side, benchmark.rows[0]
    head = (
        f"decoding {len(side.sources):,} segments of {side.name} with {benchmark.run.folder}, text to text, "
        f"{benchmark.repeats} times in turns, on {hardware(benchmark.device)}\n"
        f"(×: beside {label_of(first)}; ceiling: segments/s if the operations that a segment cannot do without ran at "
        "the measured rate;\nsame: lines translated alike)"
    )
    shortlist = max(row.shortlist for row in benchmark.rows)
    if shortlist:
        head += f"\n(short: only {shortlist} translations of each source piece may come, and the most frequent pieces)"
    parts = [_at_beam(benchmark, beam) for beam in benchmark.operations]
    footer = f"BLEU {benchmark.signature}\n{rates_in_words(benchmark.rates)}"
    return "\n\n".join([head, *parts, footer, *_doubts(benchmark)])


def as_object(benchmark: DecodingBenchmark) -> dict[str, Any]:
    """Everything measured, numbers unrounded, translations included."""
    return {
        **about(benchmark.device, benchmark.rates),
        "run": str(benchmark.run.folder),
        "side": benchmark.side.name,
        "repeats": benchmark.repeats,
        "signature": benchmark.signature,
        "operations_per_segment": benchmark.operations,
        "rows": [
            {
                **asdict(row),
                "segments_per_second": row.speed,
                "median_segments_per_second": row.median,
                "pieces_per_second": row.pieces_per_second,
                "ceiling": benchmark.ceiling(row),
                "share": benchmark.share(row),
            }
            for row in benchmark.rows
        ],
    }


def bars(benchmark: DecodingBenchmark) -> list[Bars]:
    """The speeds as bars, beam by beam."""
    return [
        Bars(
            title=f"decoding {benchmark.side.name}, beam {beam}, text to text, on {hardware(benchmark.device)}",
            unit="segments per second (BLEU behind the name)",
            speeds=[(f"{label_of(row)} ({row.bleu:.1f})", row.speed, row.program == "mtkit") for row in rows],
        )
        for beam, rows in ((beam, rows_of_beam(benchmark, beam)) for beam in benchmark.operations)
    ]


def rows_of_beam(benchmark: DecodingBenchmark, beam: int) -> list[Measured]:
    """The rows of one beam."""
    return [row for row in benchmark.rows if row.beam == beam]


def label_of(row: Measured) -> str:
    """ "mtkit float32", and with a shortlist "mtkit float32 short"."""
    return f"{row.program} {row.arithmetic}{' short' if row.shortlist else ''}"


def _at_beam(benchmark: DecodingBenchmark, beam: int) -> str:
    measured = rows_of_beam(benchmark, beam)
    rows = [["", "segments/s", "×", "median", "pieces/s", "ceiling", "share", "BLEU", "same", "batch"]]
    for row in measured:
        ceiling = benchmark.ceiling(row)
        rows.append(
            [
                label_of(row),
                f"{row.speed:,.1f}",
                times(row.speed, measured[0].speed),
                f"{row.median:,.1f}",
                f"{row.pieces_per_second:,.0f}",
                "-" if ceiling is None else f"{ceiling:,.0f}",
                percent(benchmark.share(row)),
                f"{row.bleu:.2f}",
                f"{row.same:.1%}",
                f"{row.size:,}",
            ]
        )
    return f"beam {beam}, {giga(benchmark.operations[beam])} GFLOP a segment\n{aligned(rows)}"


def _doubts(benchmark: DecodingBenchmark) -> list[str]:
    """A line for each program whose model does not seem to be the same."""
    return [
        f"note: {label_of(row)} translates only {row.same:.1%} of the lines as {label_of(benchmark.rows[0])} does, "
        "so its model may not be the same"
        for row in benchmark.rows
        if row.beam == 1 and row.arithmetic == "float32" and not row.shortlist and row.same < AGREEMENT
    ]
