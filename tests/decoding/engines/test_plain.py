"""Which models other programs have: plain ones, by the names of a recipe."""

from typing import Any

import pytest

from mtkit.decoding.engines.plain import GROUPED, check_plain, unlike_plain
from mtkit.errors import MtkitError
from tests.decoding.engines.plain import recipe_of


@pytest.mark.parametrize(
    ("attention", "options", "changes", "part"),
    [
        ("full", {}, {}, None),
        ("full", {"regularizer": "disagreement"}, {}, None),
        ("disagreement", {}, {}, None),
        ("longformer", {}, {}, "encoder attention longformer"),
        ("average", {}, {}, "decoder attention average"),
        ("full", {"positions": "rotary"}, {}, "encoder attention with positions rotary"),
        ("full", {"decoder.positions": {"name": "rotary"}}, {}, "decoder attention with positions rotary"),
        ("em-routing", {}, {}, "encoder attention with merge em-routing"),
        ("full", {"cross.projection": "multi-query"}, {}, "cross attention with projection multi-query"),
        ("full", {}, {"reversible": True}, "model.reversible"),
    ],
)
def test_the_first_part_that_is_not_plain_is_named(
    attention: str, options: dict[str, Any], changes: dict[str, Any], part: str | None
) -> None:
    recipe = recipe_of(attention, options, **changes)
    found = unlike_plain(recipe)
    assert found is None if part is None else part in str(found)
    if part is None:
        check_plain(recipe, "--option")
    else:
        with pytest.raises(MtkitError, match=f"--option takes runs with full attention.* {found}"):
            check_plain(recipe, "--option")


@pytest.mark.parametrize("attention", ["multi-query", "grouped-query"])
def test_shared_keys_and_values_are_plain_where_they_can_be(attention: str) -> None:
    assert unlike_plain(recipe_of(attention)) == f"encoder attention with projection {attention}"
    assert unlike_plain(recipe_of(attention), extra=GROUPED) is None
    assert unlike_plain(recipe_of(attention, {"positions": "rotary"}), extra=GROUPED) is not None
