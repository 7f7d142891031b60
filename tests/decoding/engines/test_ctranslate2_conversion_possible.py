"""Models that CTranslate2's format does not hold are told by what they have."""

from typing import Any

import pytest

from mtkit.decoding.engines.selection import unsupported_part
from tests.decoding.engines.plain import recipe_of


@pytest.mark.parametrize(
    ("options", "changes", "part"),
    [
        ({}, {}, None),
        ({"projection": "multi-query"}, {}, None),
        ({"positions": "rotary"}, {"positions": "none"}, None),
        ({"decoder.positions": {"name": "rotary", "half": True}}, {"positions": "none"}, None),
        ({"positions": "alibi"}, {"positions": "none"}, "encoder attention with positions alibi"),
        ({"positions": "rotary"}, {}, "model.positions sinusoidal beside the rotary positions of encoder attention"),
        (
            {"decoder.positions": {"name": "rotary"}},
            {"positions": "learned"},
            "model.positions learned beside the rotary positions of decoder attention",
        ),
    ],
    ids=str,
)
def test_the_first_part_that_it_does_not_hold_is_named(
    options: dict[str, Any], changes: dict[str, Any], part: str | None
) -> None:
    assert unsupported_part(recipe_of("full", options, **changes)) == part
