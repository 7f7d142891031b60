"""Strided attention: the catalogue's equation, its limits, and a stride that follows the longest length."""

import pytest

from mtkit.attention import build
from tests.attention.sparse.literal import agrees, is_full, is_own_value, make, reached

ROLES = ["encoder", "decoder"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("stride", [2, 5, 8])
def test_it_is_the_equation(role: str, stride: int) -> None:
    agrees(make("strided", role, stride=stride), lambda head, i, j: (i - j) % stride == 0)


@pytest.mark.parametrize("role", ROLES)
def test_a_stride_of_one_is_full_attention_and_one_of_the_length_the_own_value(role: str) -> None:
    is_full(make("strided", role, stride=1))
    is_own_value(make("strided", role, stride=37))


def test_tokens_are_counted_from_the_query_and_not_from_the_start() -> None:
    """A fixed comb agrees with it at every l-th query, and there alone."""
    assert reached(make("strided", "encoder", stride=16), 21) == {5, 21, 37, 53}
    assert reached(make("strided", "decoder", stride=16), 21) == {21, 37, 53}


@pytest.mark.parametrize(("longest", "stride"), [(1, 1), (100, 10), (1024, 32), (16384, 128)])
def test_the_stride_follows_the_longest_length_and_not_that_of_a_batch(longest: int, stride: int) -> None:
    attention = build("strided", role="encoder", d_model=16, heads=2, max_length=longest)
    assert attention.stride == stride  # type: ignore[attr-defined]
