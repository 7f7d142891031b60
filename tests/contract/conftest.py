"""Every test of a promise runs over the cases that its `each` chooses."""

import pytest

from tests.contract.cases import parametrize


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc)
