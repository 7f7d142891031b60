"""Results as files."""

from pathlib import Path

import pytest

from mtkit.experiments.pages import findings, write
from tests.experiments.pages.results import write_results


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with results, which the pages are written to."""
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    monkeypatch.setattr(write, "DOCS", tmp_path)
    monkeypatch.setattr(write, "SCORES", tmp_path / "scores.json")
    write_results(tmp_path)
    return tmp_path
