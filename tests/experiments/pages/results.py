"""Results of the study probes, as files, for tests of the pages."""

import gzip
import json
from pathlib import Path
from typing import Any

from mtkit.experiments.pages import findings
from mtkit.experiments.pages.findings import load
from tests.experiments.results import row

SPECIAL = {"band[window_radius=4]": 97.0, "topk[keys=4]": 50.0, "additive": 40.0}


def pack(path: Path, text: str) -> None:
    """Write a gzipped file."""
    path.write_bytes(gzip.compress(text.encode()))


def unpack(path: Path) -> str:
    """Read a gzipped file."""
    return gzip.decompress(path.read_bytes()).decode()


def rows_of(scores: dict[str, list[float]], task: str | None) -> list[dict[str, Any]]:
    """Rows as of a study's file, with these scores by entry and seed."""
    return [
        {
            **row(0.0),
            "valid": {"nll": 100 - value}, "format": 2, "trial": f"{task}.{entry}.{seed}", "entry": entry,
            "task": task, "seed": seed, "stage": "final", "point": {}, "recipe": {}, "data": "x",
            "scores": {"test": {"token": {"value": value, "low": 0.0, "high": 100.0, "signature": "s"}}},
        }
        for entry, values in scores.items()
        for seed, value in enumerate(values, 1)
    ]  # fmt: skip


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a study's file of results."""
    for each in rows:
        each["scores"]["test-2x"] = each["scores"]["test"]
        each["recipe"] = {
            "model": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2},
            "training": {"optimizer": "muon", "batch_tokens": 512},
        }
    pack(path, "".join(f"{json.dumps(each)}\n" for each in rows))


def write_roles(folder: Path) -> None:
    """Write results of the study roles: `topk` in the cross role has 50, `band` in the decoder 97, the others 90."""
    special = {"topk[keys=4]@cross": 50.0, "band[window_radius=4]@decoder": 97.0}
    names = [entry.name for entry in load("roles")[0].entries]
    assert set(special) <= set(names)
    scores = {name: [special.get(name, 90.0) + noise for noise in (-0.5, 0.5)] for name in names}
    write_rows(folder / "roles.jsonl.gz", rows_of(scores, "selective-copy"))


def write_results(folder: Path, *, longer: bool = False) -> None:
    """Write results in which `full` has 90, `band` 97, `topk` 50, `additive` 40, and the others 90.

    With `longer`, also of the study longer: `topk` has 96 and the others 89.
    """
    names = [entry.name for entry in load("probes")[0].entries]
    assert set(SPECIAL) <= set(names)
    scores = {name: [SPECIAL.get(name, 90.0) + noise for noise in (-0.5, 0.5)] for name in names}
    write_rows(folder / "probes.jsonl.gz", rows_of(scores, "selective-copy"))
    if longer:
        names = [entry.name for entry in load("longer")[0].entries]
        rows = rows_of({name: [96.0 if name == "topk[keys=4]" else 89.0] for name in names}, "selective-copy")
        for each in rows:
            each["training"] = {**each["training"], "updates": 3000}
        write_rows(folder / "longer.jsonl.gz", rows)
    (folder / "claims.yaml").write_text((findings.STUDIES / "results/claims.yaml").read_text())
    cases = [
        {
            "attention": name,
            "work": "forward-backward",
            "form": "sub-layer",
            "length": length,
            "full_by_this": {"flops": flops, "seconds": seconds},
        }
        for name, length, flops, seconds in (
            ("full", 2048, 1.0, 1.0),
            ("full", 16384, 1.0, 1.0),
            ("band", 2048, 5.0, 3.1),
            ("band", 16384, 40.0, 12.3),
            ("topk", 2048, 20.0, 10.2),
            ("topk", 16384, 160.0, 20.4),
        )
    ]
    (folder / "attention-encoder.json").write_text(json.dumps({"setting": {"repeats": 3}, "measurements": cases}))
