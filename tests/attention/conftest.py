"""Tests of mechanisms compute patterns of positions in blocks."""

import pytest

from mtkit.attention.bases import pattern_attention


@pytest.fixture(autouse=True)
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The segments of the tests are short, and would be computed under a mask instead."""
    monkeypatch.setattr(pattern_attention, "SHORT", 0)
