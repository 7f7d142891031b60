"""Output of a comparison: a table on the terminal or in Markdown, and JSON."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import mtkit
from mtkit import tables
from mtkit.memory.allocation import in_words

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
    return "\n".join([caption(settings, results), "", tables.aligned(_rows(results), left=LEFT)])


def markdown(settings: Mapping[str, Any], results: Results) -> str:
    """Return the caption and the table in Markdown."""
    return "\n".join([caption(settings, results), "", tables.markdown(_rows(results), left=LEFT), ""])


def as_object(settings: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """Return settings and results as a JSON object, with unrounded numbers, in the order of the table."""
    return {
        "mtkit": mtkit.__version__,
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
        *sorted({each["bleu"]["signature"] for each in results if "bleu" in each}),
    ]
    sides = {each["side"] for each in results if "side" in each}
    if sides == {"valid"}:
        parts.append("scored on the validation side")
    doubts = [f"{each['attention']}: {each['doubt']}" for each in results if "doubt" in each]
    return "; ".join([", ".join(parts), *doubts[:1]])


def _rows(results: Results) -> list[list[str]]:
    """Return head and cells; the column of notes only if a mechanism failed."""
    failures = any("failed" in each for each in results)
    rows = [[*HEAD, "note"]]
    for each in results:
        if "failed" in each:
            rows.append([row_name(each), *("-" * (len(HEAD) - 1)), f"failed: {each['failed']}"])
            continue
        bleu, training, decoding = each["bleu"], each["training"], each["decoding"]
        rows.append(
            [
                row_name(each),
                f"{bleu['value']:.2f}",
                f"{bleu['low']:.2f} to {bleu['high']:.2f}",
                f"{training['tokens_per_second']:,.0f}",
                f"{decoding['tokens_per_second']:,.0f}",
                f"{decoding['segments_per_second']:,.1f}",
                in_words(each["peak_bytes"]),
                f"{each['parameters']:,}",
                f"{training['updates']:,}",
                "",
            ]
        )
    return rows if failures else [row[:-1] for row in rows]


def _precisions(results: Results) -> list[str]:
    """Return the precisions of training, with the names of the mechanisms if there are several precisions."""
    names: dict[str, list[str]] = {}
    for each in results:
        if precision := each.get("training", {}).get("precision"):
            names.setdefault(precision, []).append(each["attention"])
    return [f"{each} ({', '.join(names[each])})" if len(names) > 1 else each for each in sorted(names)]


def _hardware(settings: Mapping[str, Any]) -> str:
    if settings["device"].startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(settings["device"])
    return f"{settings['device']} ({platform.machine()}), {settings['threads']} thread(s)"
