"""The table and the pages of mechanisms show all there is."""

import pytest

from mtkit.attention import mechanisms
from mtkit.attention.catalogue import describe, table


def test_the_table_has_a_row_for_each_mechanism() -> None:
    first_words = [line.split()[0] for line in table().split("\n")[2:]]
    assert sorted(first_words) == sorted(mechanisms())


@pytest.mark.parametrize("name", sorted(mechanisms()))
def test_a_page_names_roles_cost_and_every_option(name: str) -> None:
    mechanism, page = mechanisms()[name], describe(name)
    for word in [mechanism.paper, mechanism.complexity, *mechanism.roles, *mechanism.options]:
        assert word in page
