"""Results of the training benchmark: a table and bars for people, and JSON for programs."""

from dataclasses import asdict
from typing import Any

from mtkit.benchmark.attention_report import readable
from mtkit.benchmark.report import Bars, about, aligned, giga, percent, rates_in_words, times
from mtkit.benchmark.training import TURN, Trained, TrainingBenchmark
from mtkit.device import hardware


def table(benchmark: TrainingBenchmark) -> str:
    """Format a row for each program, attention and precision, the fastest attention first; × is relative to the base.

    With several attentions, a column compares with `full` in the same precision; with several precisions, a column
    compares with the first precision of the same attention.
    """
    recipe, plan, base = benchmark.recipe, benchmark.plan, base_of(benchmark)
    beside, updates = _beside(benchmark), f"{plan.updates} update{'s' if plan.updates > 1 else ''}"
    head = (
        f"training, preset {recipe.preset}, batches of at most {recipe.training.batch_tokens:,} padded tokens"
        f"{f' x {recipe.training.accumulate}' if recipe.training.accumulate > 1 else ''}, {updates} after "
        f"{plan.warmup} of warm-up, in turns of {TURN}, on {hardware(benchmark.device)}"
        f"{f' each of {benchmark.processes} processes' if benchmark.processes > 1 else ''}\n"
        f"(real target tokens/s; ×: relative to {label_of(base)}; share: necessary operations in the measured rate)"
    )
    rows = [["", "tokens/s", "×", *beside, "median", "share", "peak memory", "MFLOP/token", "parameters", "loss"]]
    rows += [
        [
            label_of(row),
            f"{row.speed:,.0f}",
            times(row.speed, base.speed),
            *(_times(row, other) for other in beside.values()),
            f"{row.median:,.0f}",
            percent(benchmark.share(row)),
            readable(row.peak_bytes, "peak_bytes"),
            "-" if row.operations is None else f"{row.operations / 1e6:,.1f}",
            f"{row.parameters:,}",
            f"{row.loss:.3f}",
        ]
        for row in _ordered(benchmark)
    ]
    failed = [f"failed: {label_of(row)}: {row.failed}" for row in benchmark.rows if row.failed is not None]
    return "\n\n".join([head, aligned(rows), *(["\n".join(failed)] if failed else []), rates_in_words(benchmark.rates)])


def as_object(benchmark: TrainingBenchmark) -> dict[str, Any]:
    """Return all results as JSON values, with unrounded numbers."""
    return {
        **about(benchmark.device, benchmark.rates),
        "processes": benchmark.processes,
        "recipe": benchmark.recipe.model_dump(mode="json"),
        "updates": benchmark.plan.updates,
        "warmup": benchmark.plan.warmup,
        "base": label_of(base_of(benchmark)),
        "rows": [
            {
                **asdict(row),
                **({} if row.failed is not None else _speeds(benchmark, row)),
            }
            for row in benchmark.rows
        ],
    }


def bars(benchmark: TrainingBenchmark) -> Bars:
    """Return a bar chart of the training speeds."""
    rates = ", ".join(f"{name} {giga(rate.best)} GFLOP/s" for name, rate in benchmark.rates.items())
    return Bars(
        title=f"training, preset {benchmark.recipe.preset}, on {hardware(benchmark.device)}\nmatrix products: {rates}",
        unit="real target tokens per second",
        speeds=[(label_of(row), row.speed, row.program == "mtkit") for row in _ordered(benchmark)],
    )


def base_of(benchmark: TrainingBenchmark) -> Trained:
    """Return the row that the others are compared with: the first of another program, else the first of all."""
    rows = benchmark.measured
    return next((row for row in rows if row.program != "mtkit"), rows[0])


def label_of(row: Trained) -> str:
    """Format "mtkit full float32"."""
    return f"{row.program} {row.attention} {row.precision}"


def _speeds(benchmark: TrainingBenchmark, row: Trained) -> dict[str, float | None]:
    return {
        "tokens_per_second": row.speed,
        "median_tokens_per_second": row.median,
        "times_base": row.speed / base_of(benchmark).speed,
        "share": benchmark.share(row),
    }


def _ordered(benchmark: TrainingBenchmark) -> list[Trained]:
    """Return the rows without errors, sorted by attention, the fastest first, and other programs last."""
    groups: dict[tuple[str, str], list[Trained]] = {}
    for row in benchmark.measured:
        groups.setdefault((row.program, row.attention), []).append(row)
    fastest = sorted(groups.values(), key=lambda rows: -max(row.speed for row in rows))
    return [row for rows in sorted(fastest, key=lambda rows: rows[0].program != "mtkit") for row in rows]


def _beside(benchmark: TrainingBenchmark) -> dict[str, dict[str, Trained]]:
    """Return {heading: {label of an mtkit row: the row that it is compared with}}."""
    rows = [row for row in benchmark.measured if row.program == "mtkit"]
    columns: dict[str, dict[str, Trained]] = {}
    if len({row.attention for row in rows}) > 1 and "full" in {row.attention for row in rows}:
        full = {row.precision: row for row in rows if row.attention == "full"}
        columns["× full"] = {label_of(row): full[row.precision] for row in rows if row.precision in full}
    precisions = list(dict.fromkeys(row.precision for row in rows))
    if len(precisions) > 1:
        first = {row.attention: row for row in rows if row.precision == precisions[0]}
        columns[f"× {precisions[0]}"] = {label_of(row): first[row.attention] for row in rows if row.attention in first}
    return columns


def _times(row: Trained, others: dict[str, Trained]) -> str:
    """Format the speed relative to the row that it is compared with; a dash if there is none."""
    other = others.get(label_of(row))
    return "-" if other is None else times(row.speed, other.speed)
