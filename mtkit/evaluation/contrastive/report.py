"""Tables and JSON objects of contrastive evaluation."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mtkit.evaluation.contrastive.scores import ALL, ContrastiveScores, Group
from mtkit.evaluation.report import SURE
from mtkit.terminal import aligned, shortened, stdout_width


def contrastive_text(file: str, names: Sequence[str], groups: Sequence[Group], length_penalty: float = 0.0) -> str:
    """Return a table with a line for each value of a label and system, below a title."""
    several = len(names) > 1
    heads = ["label", "value", "segments", "chance", "system", "accuracy", "95% interval", "difference", "p"]
    left = {0, 1, 4} if several else {0, 1}
    rows, last = [heads], ""
    for group in groups:
        for number, (name, accuracy) in enumerate(zip(names, group.accuracies, strict=True)):
            paired = [None, *group.paired][number]
            rows.append(
                [
                    "" if number or group.label == last else shortened(group.label),
                    "" if number or group.value is None else _shown(group.value),
                    "" if number else f"{group.segments:,}",
                    "" if number else f"{group.chance:.1f}",
                    name,
                    f"{accuracy.value:.2f}",
                    f"{accuracy.low:.2f} to {accuracy.high:.2f}",
                    "" if paired is None else f"{paired.value:+.2f}",
                    "" if paired is None else _p_cell(paired.p_holm),
                ]
            )
        last = group.label
    shown = rows if several else [[*row[:4], *row[5:7]] for row in rows]
    score = "log-probability" + ("" if length_penalty == 0 else f" / length^{length_penalty:g}")
    title = f"{file}: share of segments in which the right translation has the highest {score}, in per cent"
    parts = [title, aligned(shown, left=left, width=stdout_width())]
    if several:
        parts.append(
            f"difference: the accuracy minus the accuracy of {names[0]}; p: McNemar's exact test, two-sided, adjusted "
            f"by Holm's method for the rows of a label; * below {SURE}"
        )
    return "\n\n".join(parts)


def contrastive_object(
    file: str,
    names: Sequence[str],
    systems: Sequence[ContrastiveScores],
    groups: Sequence[Group],
    length_penalty: float = 0.0,
) -> dict[str, Any]:
    """Return the JSON object of unrounded numbers: of all segments, and by label and value."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        row = {
            **({} if group.label == ALL else {"value": group.value}),
            "segments": group.segments,
            "chance": group.chance,
            "systems": [
                {"name": name, **asdict(accuracy), "difference": paired and asdict(paired)}
                for name, accuracy, paired in zip(names, group.accuracies, [None, *group.paired], strict=True)
            ],
        }
        by_label.setdefault(group.label, []).append(row)
    (overall,) = by_label.pop(ALL)
    return {
        "file": file,
        "length_penalty": length_penalty,
        "scores": [{"name": name, "path": str(system.path)} for name, system in zip(names, systems, strict=True)],
        ALL: overall,
        "labels": by_label,
    }


def _p_cell(p: float) -> str:
    return f"{'<0.0001' if p < 0.0001 else format(p, '.4f')} {'*' if p < SURE else ' '}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shortened(str(value))
