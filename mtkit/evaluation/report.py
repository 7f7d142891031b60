"""Scores for people, as a table, and for programs, as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mtkit.evaluation.scores import Score


def table(scores: Sequence[Score]) -> str:
    """A line for each score: name, value, 95% confidence interval where there is one, signature."""
    rows = [["metric", "score", "95% interval", "signature"]]
    rows += [[score.name, f"{score.value:.2f}", _interval(score), score.signature] for score in scores]
    if all(score.low is None for score in scores):
        rows = [[name, value, signature] for name, value, _, signature in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_objects(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """An object for each score, its numbers unrounded."""
    return [asdict(score) for score in scores]


def _interval(score: Score) -> str:
    return "" if score.low is None or score.high is None else f"{score.low:.2f} to {score.high:.2f}"
