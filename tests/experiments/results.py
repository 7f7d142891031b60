"""Rows as the processes of a comparison write them, with chosen numbers."""

from typing import Any

import numpy as np

from mtkit.evaluation.metrics import make_metric
from mtkit.evaluation.statistics import gather

SEGMENTS = 8
REFERENCES = [f"the boy number {number} sleeps in the old house" for number in range(SEGMENTS)]


def row(bleu: float, **changed: Any) -> dict[str, Any]:
    """What a trial measured."""
    return {
        "family": "scoring",
        "side": "test",
        "scores": {
            "test": {
                "BLEU": {"value": bleu, "low": bleu - 1.5, "high": bleu + 1.25, "signature": "nrefs:1|tok:13a"},
                "chrF": {"value": bleu + 2, "low": bleu, "high": bleu + 3, "signature": "nrefs:1|nc:6"},
            }
        },
        "valid": {"update": 500, "nll": 1.25, "bleu": bleu + 1, "best_by": "bleu"},
        "curve": [{"update": 500, "tokens": 1000, "seconds": 2.5, "nll": 1.25, "bleu": bleu + 1, "best_by": "bleu"}],
        "decoding": {"tokens_per_second": 1234.5, "segments_per_second": 67.89},
        "parameters": 1_234_567,
        "flops_per_token": 7.14e6,
        "state_bytes": {"100": 2048, "1000": 20480},
        "training": {
            "updates": 1_000,
            "tokens": 5000,
            "seconds": 3.0,
            "tokens_per_second": 45_678.9,
            "precision": "float32",
        },
        "peak_bytes": 812 * 2**20,
        "minutes": 1.5,
        "shared": False,
        "hardware": "cpu (x86_64), 1 thread(s)",
        "threads": 1,
        **changed,
    }


def statistics(wrong: int, metric: str = "exact") -> dict[str, np.ndarray]:
    """Statistics of translations of which the first `wrong` are wrong."""
    hypotheses = [f"wrong {line}" if place < wrong else line for place, line in enumerate(REFERENCES)]
    (found,) = gather([(metric, [make_metric(metric)])], hypotheses, [REFERENCES])
    return {f"test/{metric}": found.rows}
