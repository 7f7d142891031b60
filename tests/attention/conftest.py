"""Tests of mechanisms compute patterns of positions in blocks."""

import pytest

from mtkit.attention.bases import pattern_attention


@pytest.fixture(autouse=True)
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long segments; those of the tests are short."""
    monkeypatch.setattr(pattern_attention, "SHORT", 0)
