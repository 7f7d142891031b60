"""Results as the processes of a comparison write them, with chosen numbers."""

from typing import Any


def result(name: str, bleu: float, **changed: Any) -> dict[str, Any]:
    return {
        "attention": name,
        "bleu": {"value": bleu, "low": bleu - 1.5, "high": bleu + 1.25, "signature": "nrefs:1|tok:13a"},
        "side": "test",
        "decoding": {"tokens_per_second": 1234.5, "segments_per_second": 67.89},
        "parameters": 1_234_567,
        "training": {"updates": 1_000, "tokens_per_second": 45_678.9},
        "peak_bytes": 812 * 2**20,
        **changed,
    }
