"""The benchmark of documents for people, as tables and bars, and for programs, as JSON."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mtkit.benchmark.attention_report import aligned, hardware
from mtkit.benchmark.documents.measure import LAST, DocumentBenchmark, DocumentSetting, MeasuredDocument
from mtkit.benchmark.report import Bars, about, times


def table(benchmark: DocumentBenchmark) -> str:
    """Milliseconds per piece at the end and over the whole of each document; × is beside `full`."""
    setting, size = benchmark.setting, benchmark.setting.recipe.model
    head = (
        f"decoding {_documents(setting)} of as many source as target pieces, beam {setting.beam}, "
        f"{setting.arithmetic}, on {hardware(setting.device)}\n"
        f"(untrained model: {size.encoder_layers} + {size.decoder_layers} layers of width {size.d_model}, "
        f"{setting.vocabulary:,} pieces; encoder full; ×: how many times faster than full in both roles)"
    )
    last = _section(benchmark, f"milliseconds per piece, last {LAST} pieces", lambda row: row.last)
    whole = _section(benchmark, "milliseconds per piece, whole document", lambda row: row.seconds / row.length)
    return "\n\n".join([head, last, whole])


def as_object(benchmark: DocumentBenchmark) -> dict[str, Any]:
    """Everything measured, numbers unrounded."""
    setting = benchmark.setting
    return {
        **about(setting.device, {}),
        "documents": setting.documents,
        "beam": setting.beam,
        "arithmetic": setting.arithmetic,
        "repeats": setting.repeats,
        "vocabulary": setting.vocabulary,
        "model": setting.recipe.model.model_dump(mode="json"),
        "options": dict(setting.options),
        "pieces_at_the_end": LAST,
        "rows": [asdict(row) for row in benchmark.rows],
    }


def bars(benchmark: DocumentBenchmark) -> list[Bars]:
    """The speeds at the end of documents as bars, length by length."""
    setting = benchmark.setting
    what = _documents(setting)
    return [
        Bars(
            title=f"end of {what} of {length:,} pieces, beam {setting.beam}, on {hardware(setting.device)}",
            unit="pieces per second",
            speeds=[(_label(row), 1 / row.last, True) for row in benchmark.rows if row.length == length],
        )
        for length in benchmark.lengths
    ]


def _section(benchmark: DocumentBenchmark, title: str, cost: Callable[[MeasuredDocument], float]) -> str:
    rows = [["", *(f"{length:,}" for length in benchmark.lengths)]]
    for name in benchmark.names:
        measured = [benchmark.row(name, length) for length in benchmark.lengths]
        full = [benchmark.row("full", length) for length in benchmark.lengths]
        cells = [
            f"{cost(row) * 1e3:.3g} {times(cost(base), cost(row)):>6}" for row, base in zip(measured, full, strict=True)
        ]
        rows.append([_label(measured[0]), *cells])
    return f"{title}\n{aligned(rows)}"


def _documents(setting: DocumentSetting) -> str:
    return "one document" if setting.documents == 1 else f"{setting.documents:,} documents at once,"


def _label(row: MeasuredDocument) -> str:
    """ "linear", or "band (decoder)" where it fills one of the two roles."""
    return row.attention if len(row.roles) > 1 else f"{row.attention} ({row.roles[0]})"
