"""Every test of a promise runs over the cases that its `each` chooses."""

import pytest

from mtkit.attention.bases import pattern_attention
from tests.contract.cases import parametrize


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc)


@pytest.fixture(autouse=True)
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns of positions are computed in blocks, as in long segments.

    The segments of the tests are short, and would be computed under a mask instead.
    """
    monkeypatch.setattr(pattern_attention, "SHORT", 0)
