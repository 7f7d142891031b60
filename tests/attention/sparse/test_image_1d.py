"""Local attention in one dimension: the catalogue's blocks and memories, their limits and what decoding keeps."""

import pytest

from tests.attention.sparse.literal import agrees, is_full, is_own_value, kept, make, reached

ROLES = ["encoder", "decoder"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("block", "memory"), [(4, 3), (7, 0), (3, 10), (8, 8)])
def test_it_is_the_equation(role: str, block: int, memory: int) -> None:
    def sees(head: int, i: int, j: int) -> bool:
        own = [at for at in range(200) if at // block == i // block]
        return j in own or own[0] - memory <= j < own[0] or own[-1] < j <= own[-1] + memory

    agrees(make("image-1d", role, image_block=block, image_memory=memory), sees)


@pytest.mark.parametrize("role", ROLES)
def test_one_block_for_all_is_full_attention_and_one_for_each_the_own_value(role: str) -> None:
    is_full(make("image-1d", role, image_block=37, image_memory=0))
    is_full(make("image-1d", role, image_block=5, image_memory=36))
    is_own_value(make("image-1d", role, image_block=1, image_memory=0))


def test_a_token_reaches_the_blocks_whose_memory_it_lies_in() -> None:
    assert reached(make("image-1d", "encoder", image_block=8, image_memory=3), 21) == set(range(16, 32))
    assert reached(make("image-1d", "encoder", image_block=8, image_memory=3), 19) == set(range(16, 24))
    assert reached(make("image-1d", "encoder", image_block=8, image_memory=3), 18) == set(range(8, 24))
    assert reached(make("image-1d", "decoder", image_block=8, image_memory=3), 21) == set(range(21, 32))


def test_decoding_keeps_a_block_and_its_memory() -> None:
    assert kept(make("image-1d", "decoder", image_block=8, image_memory=5), 50) == 13
