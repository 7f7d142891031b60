"""The table and the pages of mechanisms show all there is."""

from types import ModuleType

import pytest

from mtkit.attention import mechanisms
from mtkit.attention.catalogue import describe, table
from mtkit.attention.contract import Attention
from mtkit.attention.registry import _only_mechanism_in


def test_the_table_has_a_row_for_each_mechanism() -> None:
    first_words = [line.split()[0] for line in table().split("\n")[2:]]
    assert sorted(first_words) == sorted(mechanisms())


@pytest.mark.parametrize("name", sorted(mechanisms()))
def test_a_page_names_roles_cost_and_every_option(name: str) -> None:
    mechanism, page = mechanisms()[name], describe(name)
    for word in [mechanism.paper, mechanism.complexity, *mechanism.roles, *mechanism.options]:
        assert word in page


def test_a_page_says_what_options_mean() -> None:
    assert "window_radius: tokens seen on each side" in describe("band")


def test_a_class_that_declares_too_little_is_told_what_is_missing() -> None:
    module = ModuleType("mine")
    module.Mine = type("Mine", (Attention,), {"__module__": "mine", "paper": "", "growth": 1})  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Mine in mine does not declare: roles, published, complexity"):
        _only_mechanism_in(module)
