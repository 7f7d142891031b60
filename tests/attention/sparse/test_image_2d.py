"""Local attention in two dimensions: the catalogue's rectangles, their limits and what decoding keeps."""

from functools import partial

import pytest
import torch

from mtkit.attention import build
from mtkit.errors import MtkitError
from tests.attention.sparse.literal import agrees, is_full, is_own_value, kept, make, reached
from tests.contract.counting import saved_tensors

ROLES = ["encoder", "decoder"]
SHAPES = [(5, [2, 3], [1, 1]), (6, [1, 2], [0, 1]), (4, [3, 4], [2, 0]), (7, [2, 5], [1, 3]), (1, [2, 2], [1, 1])]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("width", "block", "margin"), SHAPES)
def test_it_is_the_equation(role: str, width: int, block: list[int], margin: list[int]) -> None:
    def sees(head: int, i: int, j: int) -> bool:
        (row, column), (key_row, key_column) = divmod(i, width), divmod(j, width)
        top, left = row // block[0] * block[0], column // block[1] * block[1]
        rows = range(top - margin[0], top + block[0] + margin[0])
        return key_row in rows and key_column in range(left - margin[1], left + block[1] + margin[1])

    agrees(make("image-2d", role, image_width=width, image_query_shape=block, image_flange=margin), sees)


@pytest.mark.parametrize("role", ROLES)
def test_one_block_for_the_grid_is_full_attention_and_one_for_each_token_the_own_value(role: str) -> None:
    is_full(make("image-2d", role, image_width=6, image_query_shape=[7, 6], image_flange=[0, 0]))
    is_full(make("image-2d", role, image_width=6, image_query_shape=[2, 3], image_flange=[6, 3]))
    is_own_value(make("image-2d", role, image_width=6, image_query_shape=[1, 1], image_flange=[0, 0]))


def test_what_lies_right_of_the_block_in_its_own_rows_is_the_future_in_the_decoder() -> None:
    """Rows of 8, blocks of 2 x 4: token 9 (row 1, column 1) sees token 4 (row 0, column 4), token 1 does not."""
    options = {"image_width": 8, "image_query_shape": [2, 4], "image_flange": [0, 2]}
    assert reached(make("image-2d", "encoder", **options), 4) >= {1, 9}
    after = reached(make("image-2d", "decoder", **options), 4)
    assert 9 in after
    assert min(after) == 4


def test_shapes_may_be_written_as_people_say_them() -> None:
    attention = make("image-2d", "encoder", image_width=6, image_query_shape="2x3", image_flange="1,0")
    same = make("image-2d", "encoder", image_width=6, image_query_shape=[2, 3], image_flange=(1, 0))
    assert reached(attention, 14) == reached(same, 14)


def test_decoding_keeps_the_rows_that_are_still_seen() -> None:
    options = {"image_width": 6, "image_query_shape": [2, 3], "image_flange": [1, 2]}
    assert kept(make("image-2d", "decoder", **options), 60) == (2 + 1) * 6


@pytest.mark.parametrize("role", ROLES)
def test_training_keeps_little_more_of_a_token_than_full_attention_does(role: str) -> None:
    """At the default options, in bytes that the backward pass reads."""
    sizes = {}
    for name in ("full", "image-2d"):
        attention, x = build(name, role=role, d_model=32, heads=4), torch.randn(1, 1024, 32, requires_grad=True)
        storages = [saved.untyped_storage() for saved in saved_tensors(partial(attention, x))]
        sizes[name] = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert sizes["image-2d"] < 1.5 * sizes["full"]


@pytest.mark.parametrize("shape", [[8], [8, 16, 2], [0, 4], 8, "8", "8x", "8x0", "8 by 16"])
def test_shapes_are_two_numbers(shape: object) -> None:
    with pytest.raises(MtkitError, match=r"must be a list of 2 whole numbers from 1 to .*, rows and columns"):
        make("image-2d", "encoder", image_query_shape=shape)
