"""Results of the decoding benchmark: tables and bars for people, and JSON for programs."""

from dataclasses import asdict
from typing import Any

from mtkit.benchmark.decoding import DecodingBenchmark, Measured
from mtkit.benchmark.report import Bars, about, aligned, giga, percent, rates_in_words, times
from mtkit.device import hardware

AGREEMENT = 0.95
"""Minimum share of equal greedy translations in float32; below it, another program's model is doubtful."""


def table(benchmark: DecodingBenchmark) -> str:
    """Format a table for each beam, with a row for each run, program and arithmetic; × is relative to the first row."""
    side, runs = benchmark.side, [str(run.folder) for run in benchmark.runs.values()]
    first, of_its_run = label_of(benchmark, benchmark.rows[0]), " as by the first row of the same run"
    head = (
        f"decoding {len(side.sources):,} segments of {side.name} with {', '.join(runs)}, text to text, "
        f"{benchmark.repeats} times in turns, on {hardware(benchmark.device)}\n"
        f"(×: relative to {first}; ceiling: segments/s if the necessary operations ran at "
        f"the measured rate;\nsame: lines translated alike{of_its_run if len(runs) > 1 else ''})"
    )
    shortlist = max(row.shortlist for row in benchmark.rows)
    if shortlist:
        head += f"\n(short: only {shortlist} translations of each source piece may come, and the most frequent pieces)"
    parts = [_at_beam(benchmark, beam) for beam in benchmark.beams]
    footer = f"BLEU {benchmark.signature}\n{rates_in_words(benchmark.rates)}"
    failed = [f"failed: {label_of(benchmark, row)}, beam {row.beam}: {error}" for row, error in benchmark.failed]
    return "\n\n".join([head, *parts, *failed, footer, *_doubts(benchmark)])


def as_object(benchmark: DecodingBenchmark) -> dict[str, Any]:
    """Return all results as JSON values, with unrounded numbers and the translations."""
    return {
        **about(benchmark.device, benchmark.rates),
        "runs": {name: str(run.folder) for name, run in benchmark.runs.items()},
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
        "failed": [{**asdict(row), "error": error} for row, error in benchmark.failed],
    }


def bars(benchmark: DecodingBenchmark) -> list[Bars]:
    """Return the speeds as bars, one chart per beam."""
    return [
        Bars(
            title=f"decoding {benchmark.side.name}, beam {beam}, text to text, on {hardware(benchmark.device)}",
            unit="segments per second (BLEU after the name)",
            speeds=[
                (f"{label_of(benchmark, row)} ({row.bleu:.1f})", row.speed, row.program == "mtkit")
                for row in benchmark.of_beam(beam)
            ],
        )
        for beam in benchmark.beams
    ]


def label_of(benchmark: DecodingBenchmark, row: Measured) -> str:
    """ "mtkit float32 short" with a shortlist; of several runs "NAME: mtkit float32 short"."""
    run = f"{row.run}: " if len(benchmark.runs) > 1 else ""
    return f"{run}{row.program} {row.arithmetic}{' short' if row.shortlist else ''}"


def _at_beam(benchmark: DecodingBenchmark, beam: int) -> str:
    measured = benchmark.of_beam(beam)
    rows = [["", "segments/s", "×", "median", "pieces/s", "ceiling", "share", "BLEU", "same", "batch"]]
    for row in measured:
        ceiling = benchmark.ceiling(row)
        rows.append(
            [
                label_of(benchmark, row),
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
    needed = [
        f"{giga(its[beam])} GFLOP a segment{f' of {name}' if len(benchmark.runs) > 1 else ''}"
        for name, its in benchmark.operations.items()
    ]
    return f"beam {beam}, {', '.join(needed)}\n{aligned(rows)}"


def _doubts(benchmark: DecodingBenchmark) -> list[str]:
    """Return a line for each program whose model seems to differ."""
    first = {row.run: row for row in reversed(benchmark.rows)}
    return [
        f"note: {label_of(benchmark, row)} translates only {row.same:.1%} of the lines as "
        f"{label_of(benchmark, first[row.run])} does, so its model may not be the same"
        for row in benchmark.rows
        if row.beam == 1 and not row.shortlist and row.same < AGREEMENT
        if row.arithmetic == first[row.run].arithmetic == "float32"
    ]
