"""Output of a comparison: a table on the terminal or in Markdown, and JSON."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mtkit import terminal
from mtkit.memory import in_words
from mtkit.version import __version__

HEAD = (
    "attention", "BLEU", "95% interval", "training tokens/s", "decoding tokens/s", "segments/s", "peak memory",
    "parameters", "updates",
)  # fmt: skip
LEFT = frozenset({0, len(HEAD)})
"""Left-aligned columns: name and note."""

Results = Sequence[Mapping[str, Any]]
"""Results of `Folder.results`."""


def table(settings: Mapping[str, Any], results: Results) -> str:
    """Return the table, with the caption above it."""
    return "\n".join([caption(settings, results), "", terminal.aligned(_rows(results), left=LEFT)])


def markdown(settings: Mapping[str, Any], results: Results) -> str:
    """Return the caption and the table in Markdown."""
    return "\n".join([caption(settings, results), "", terminal.markdown(_rows(results), left=LEFT), ""])


def as_object(settings: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """Return settings and results as a JSON object, with unrounded numbers, in the order of the table."""
    return {
        "mtkit": __version__,
        "torch": torch.__version__,
        "hardware": _hardware(settings),
        "settings": dict(settings),
        "results": list(results),
    }


def row_name(result: Mapping[str, Any]) -> str:
    """Return the mechanism with its options, as in `longformer window_radius=8`."""
    return " ".join([result["attention"], *(f"{key}={value}" for key, value in result.get("options", {}).items())])


def caption(settings: Mapping[str, Any], results: Results) -> str:
    """Return the common settings of all rows in one line, with the first warning if there is one."""
    recipe = settings["recipe"]
    training, decoding = recipe["training"], recipe["decoding"]
    units = {"max_updates": "updates", "max_epochs": "epochs", "max_minutes": "minutes"}
    limits = [f"{training[name]:,.10g} {unit}" for name, unit in units.items() if training[name]]
    method = f"beam {decoding['beam']}" if decoding["method"] == "beam" else decoding["method"]
    parts = [
        f"preset {recipe['preset']}",
        f"seed {recipe['seed']}",
        f"until {' or '.join(limits) or 'patience ends'}",
        f"{training['batch_tokens']:,} tokens per batch",
        *_precisions(results),
        method,
        _hardware(settings),
        *sorted({entry["bleu"]["signature"] for entry in results if "bleu" in entry}),
    ]
    sides = {entry["side"] for entry in results if "side" in entry}
    if sides == {"valid"}:
        parts.append("scored on the validation side")
    doubts = [f"{entry['attention']}: {entry['doubt']}" for entry in results if "doubt" in entry]
    return "; ".join([", ".join(parts), *doubts[:1]])


def _rows(results: Results) -> list[list[str]]:
    """Return head and cells; the column of notes only if a mechanism failed."""
    failures = any("failed" in entry for entry in results)
    rows = [[*HEAD, "note"]]
    for entry in results:
        if "failed" in entry:
            rows.append([row_name(entry), *("-" * (len(HEAD) - 1)), f"failed: {entry['failed']}"])
            continue
        bleu, training, decoding = entry["bleu"], entry["training"], entry["decoding"]
        rows.append(
            [
                row_name(entry),
                f"{bleu['value']:.2f}",
                f"{bleu['low']:.2f} to {bleu['high']:.2f}",
                f"{training['tokens_per_second']:,.0f}",
                f"{decoding['tokens_per_second']:,.0f}",
                f"{decoding['segments_per_second']:,.1f}",
                in_words(entry["peak_bytes"]),
                f"{entry['parameters']:,}",
                f"{training['updates']:,}",
                "",
            ]
        )
    return rows if failures else [row[:-1] for row in rows]


def _precisions(results: Results) -> list[str]:
    """Return the precisions of training, with the names of the mechanisms if there are several precisions."""
    names: dict[str, list[str]] = {}
    for entry in results:
        if precision := entry.get("training", {}).get("precision"):
            names.setdefault(precision, []).append(entry["attention"])
    return [f"{entry} ({', '.join(names[entry])})" if len(names) > 1 else entry for entry in sorted(names)]


def _hardware(settings: Mapping[str, Any]) -> str:
    if settings["device"].startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(settings["device"])
    return f"{settings['device']} ({platform.machine()}), {settings['threads']} thread(s)"
