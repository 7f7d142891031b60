import json
from pathlib import Path

import pytest

from mtkit.experiments import findings, page
from mtkit.experiments.entries import parse_entries
from mtkit.experiments.findings import load
from mtkit.experiments.page import answer, main, pages
from tests.experiments.test_findings import rows_of

DOCS = Path(__file__).parents[2] / "docs"


def test_the_committed_pages_are_what_the_results_make() -> None:
    for name, text in pages(answer()).items():
        assert (DOCS / name).read_text(encoding="utf-8") == text


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results in which `full` has 90, `band` 97, `topk` 50, and the others 90."""
    special = {"band[window_radius=4]": 97.0, "topk[keys=4]": 50.0}
    names = [entry.name for entry in load("probes")[0].entries]
    assert {name.partition("[")[0] for name in names} >= {"full", "band", "topk"}
    scores = {name: [special.get(name, 90.0) + noise for noise in (-0.5, 0.5)] for name in names}
    rows = rows_of(scores, "selective-copy")
    for each in rows:
        each["scores"]["test-2x"] = each["scores"]["test"]
        each["recipe"] = {
            "model": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2},
            "training": {"optimizer": "muon", "batch_tokens": 512},
        }
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "DOCS", tmp_path)
    (tmp_path / "probes.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    (tmp_path / "claims.yaml").write_text((findings.STUDIES / "results/claims.yaml").read_text())
    return tmp_path


def test_the_page_names_the_best_and_the_worst(results: Path) -> None:
    text = pages(answer())["choose.md"]
    assert "2 seeds, 1000 updates of Muon with 512 tokens per batch" in text
    assert "`full` has 90.0. Best: `band` 97.0 +, `full` 90.0" in text
    assert "worse than `full` on `select` are `topk` 50.0." in text
    # a step of 1 around 90 is 1 / 60 of a radian, so the interval ends 1.99 / 2 / 60 radian, or 1.0 points, from 90
    assert "2 of 78 differences to `full` (90.0, 95% interval 89.0 to 91.0) are significant" in text
    assert "`sort`) (0 trainings of 79 entries, `mtkit compare --study probes`)" in text
    assert len([line for line in text.splitlines() if line.startswith("| `")]) == 79
    assert "| `band`" in text.split("## Every mechanism")[1].splitlines()[6]


def test_the_claims_have_computed_verdicts(results: Path) -> None:
    lines = pages(answer())["claims.md"].splitlines()
    said = {line.split("`")[1]: line.rpartition(" | ")[2].strip(" |") for line in lines if line.startswith("| `")}
    assert len(said) == 79
    assert said["band"] == "held"
    assert said["topk"] == "not seen at this size"  # significantly worse, but two seeds
    assert said["linear"] == "not measured"  # its task has no results


@pytest.mark.parametrize("hole", ['"gau"', '.gau.2"'])
def test_a_study_with_a_hole_makes_no_page(results: Path, hole: str) -> None:
    lines = (results / "probes.jsonl").read_text().splitlines(keepends=True)
    (results / "probes.jsonl").write_text("".join(line for line in lines if hole not in line))
    assert pages(answer()) == {}
    main()
    assert not (results / "choose.md").exists()


def test_the_files_are_written(results: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = [
        {
            "attention": name,
            "work": "forward-backward",
            "form": "sub-layer",
            "length": 2048,
            "full_by_this": {"flops": 2.0},
        }
        for name in ("full", "band")
    ]
    (results / "attention-encoder.json").write_text(json.dumps({"measurements": cases}))
    main()
    assert (results / "choose.png").stat().st_size > 10_000
    assert (results / "choose.md").read_text() == pages(answer())["choose.md"]
    assert (results / "claims.md").exists()


def test_entries_of_the_study_are_mechanisms() -> None:
    assert len(parse_entries(load("probes")[0].settings.entries)) == 79
