"""The benchmark of training for people, as a table and bars, and for programs, as JSON."""

from dataclasses import asdict
from typing import Any

from mtkit.benchmark.attention_report import aligned, hardware, readable
from mtkit.benchmark.report import Bars, about, giga, percent, rates_in_words, times
from mtkit.benchmark.training import TURN, Trained, TrainingBenchmark


def table(benchmark: TrainingBenchmark) -> str:
    """A row for each program, attention and precision; × is how many times as fast as the base."""
    recipe, plan, base = benchmark.recipe, benchmark.plan, base_of(benchmark)
    head = (
        f"training, preset {recipe.preset}, batches of at most {recipe.training.batch_tokens:,} padded tokens"
        f"{f' x {recipe.training.accumulate}' if recipe.training.accumulate > 1 else ''}, {plan.updates} updates after "
        f"{plan.warmup} of warm-up, in turns of {TURN}, on {hardware(benchmark.device)}"
        f"{f' each of {benchmark.processes} processes' if benchmark.processes > 1 else ''}\n"
        f"(real target tokens/s; ×: beside {label_of(base)}; share: necessary operations in the measured rate)"
    )
    rows = [["", "tokens/s", "×", "median", "share", "peak memory", "MFLOP/token", "parameters", "loss"]]
    rows += [
        [
            label_of(row),
            f"{row.speed:,.0f}",
            times(row.speed, base.speed),
            f"{row.median:,.0f}",
            percent(benchmark.share(row)),
            readable(row.peak_bytes, "peak_bytes"),
            "-" if row.operations is None else f"{row.operations / 1e6:,.1f}",
            f"{row.parameters:,}",
            f"{row.loss:.3f}",
        ]
        for row in benchmark.rows
    ]
    return f"{head}\n\n{aligned(rows)}\n\n{rates_in_words(benchmark.rates)}"


def as_object(benchmark: TrainingBenchmark) -> dict[str, Any]:
    """Everything measured, numbers unrounded."""
    base = base_of(benchmark)
    return {
        **about(benchmark.device, benchmark.rates),
        "processes": benchmark.processes,
        "recipe": benchmark.recipe.model_dump(mode="json"),
        "updates": benchmark.plan.updates,
        "warmup": benchmark.plan.warmup,
        "base": label_of(base),
        "rows": [
            {
                **asdict(row),
                "tokens_per_second": row.speed,
                "median_tokens_per_second": row.median,
                "times_base": row.speed / base.speed,
                "share": benchmark.share(row),
            }
            for row in benchmark.rows
        ],
    }


def bars(benchmark: TrainingBenchmark) -> Bars:
    """A bar chart of the training speeds."""
    rates = ", ".join(f"{name} {giga(rate.best)} GFLOP/s" for name, rate in benchmark.rates.items())
    return Bars(
        title=f"training, preset {benchmark.recipe.preset}, on {hardware(benchmark.device)}\nmatrix products: {rates}",
        unit="real target tokens per second",
        speeds=[(label_of(row), row.speed, row.program == "mtkit") for row in benchmark.rows],
    )


def base_of(benchmark: TrainingBenchmark) -> Trained:
    """What the others are compared with: the first of another program, or the first of all."""
    return next((row for row in benchmark.rows if row.program != "mtkit"), benchmark.rows[0])


def label_of(row: Trained) -> str:
    """ "mtkit full float32"."""
    return f"{row.program} {row.attention} {row.precision}"
