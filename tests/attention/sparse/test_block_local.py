"""Block-local attention: the catalogue's blocks, their limits and what decoding keeps."""

import pytest

from tests.attention.sparse.literal import agrees, is_full, is_own_value, kept, make, reached

ROLES = ["encoder", "decoder"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("size", "back", "ahead"), [(4, 0, 0), (7, 1, 0), (5, 0, 1), (3, 2, 1), (16, 0, 0)])
def test_it_is_the_equation(role: str, size: int, back: int, ahead: int) -> None:
    attention = make("block-local", role, block_size=size, block_back=back, block_fwd=ahead)
    agrees(attention, lambda head, i, j: i // size - back <= j // size <= i // size + ahead)


@pytest.mark.parametrize("role", ROLES)
def test_one_block_for_all_is_full_attention_and_one_for_each_the_own_value(role: str) -> None:
    is_full(make("block-local", role, block_size=37))
    is_full(make("block-local", role, block_size=10, block_back=3, block_fwd=3))
    is_own_value(make("block-local", role, block_size=1))


def test_a_token_reaches_its_block_and_nothing_else() -> None:
    assert reached(make("block-local", "encoder", block_size=8), 17) == set(range(16, 24))
    assert reached(make("block-local", "decoder", block_size=8), 17) == set(range(17, 24))
    assert reached(make("block-local", "decoder", block_size=8, block_back=1), 17) == set(range(17, 32))


def test_decoding_keeps_the_blocks_that_are_still_seen() -> None:
    assert kept(make("block-local", "decoder", block_size=8), 50) == 8
    assert kept(make("block-local", "decoder", block_size=8, block_back=2), 50) == 24
