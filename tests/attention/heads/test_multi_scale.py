"""Multi-scale attention: the windows of the heads, how many have which, and what decoding keeps."""

from typing import Any

import pytest
import torch

from mtkit.attention import build
from mtkit.errors import MtkitError
from tests.attention.sparse.literal import agrees, is_full, is_own_value, kept, make, reached

ROLES = ["encoder", "decoder"]


def widths(**given: Any) -> list[int]:
    """Of a layer's heads, from the numbers of keys that the query in the middle sees."""
    site: dict[str, Any] = {"role": "encoder", "d_model": 80, "heads": 8} | given
    attention = build("multi-scale", **site).eval()
    with torch.no_grad():
        weights = attention(torch.randn(1, 161, 80), need_weights=True).weights
    assert weights is not None
    seen = (weights[0, :, 80] > 0).sum(-1)
    assert (seen % 2 == 1).all()
    return [(int(each) - 1) // 2 for each in seen]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({"scales": [1, 3, 5]}, [1, 3, 5, 5]),  # one layer is the last: equal numbers, the rest to the widest
        ({"scales": "2,40"}, [2, 2, 40, 40]),
        ({"scales": 3}, [3, 3, 3, 3]),
        ({"widths": [7, 0, 33, 2]}, [7, 0, 33, 2]),
        ({"widths": "9,1"}, [9, 9, 1, 1]),
    ],
)
def test_it_is_the_equation(role: str, options: dict[str, Any], each: list[int]) -> None:
    agrees(make("multi-scale", role, **options), lambda head, i, j: abs(i - j) <= each[head])


@pytest.mark.parametrize("role", ROLES)
def test_wide_enough_scales_are_full_attention_and_a_scale_of_zero_the_own_value(role: str) -> None:
    is_full(make("multi-scale", role, scales=[36, 37, 1024]))
    is_own_value(make("multi-scale", role, scales=0))


@pytest.mark.parametrize("role", ROLES)
def test_a_scale_is_that_of_one_side(role: str) -> None:
    steps = {-3, -2, -1, 0, 1, 2, 3} if role == "encoder" else {0, 1, 2, 3}
    assert reached(make("multi-scale", role, scales=3), 31) == {31 + step for step in steps}


def test_lower_layers_have_more_narrow_heads_and_the_last_has_as_many_of_each() -> None:
    """8 softmax(1, 1/2, 0) = (4.05, 2.46, 1.49), 8 softmax(1/2, 1/4, 0) = (3.35, 2.61, 2.03), 8/3 = 2.67."""
    layers = [widths(scales=[1, 3, 16], layer=layer, layers=3) for layer in range(3)]
    assert layers == [
        [1] * 4 + [3] * 2 + [16] * 2,
        [1] * 3 + [3] * 3 + [16] * 2,
        [1] * 2 + [3] * 3 + [16] * 3,
    ]


def test_scale_alpha_is_how_much_narrower_lower_layers_are() -> None:
    means = []
    for alpha in (-1.0, 0.0, 1.0, 100.0):
        found = widths(scales=[1, 3, 16, 32], scale_alpha=alpha, layers=2)
        means.append(sum(found))
    assert means == sorted(set(means), reverse=True)
    assert means[1] == 2 * (1 + 3 + 16 + 32)
    assert means[3] == 8 * 1


def test_equal_remainders_go_to_the_wider_scales() -> None:
    assert widths() == [1, 3, 16, 16, 32, 32, 64, 64]


def test_a_table_has_a_row_for_each_layer() -> None:
    assert widths(widths=[1, 2, 3, 4, 0, 9, 5, 7], layers=2, layer=1) == [0, 0, 9, 9, 5, 5, 7, 7]
    assert widths(widths="6,8", layers=2) == [6] * 8


def test_windows_do_not_depend_on_the_length_of_the_batch() -> None:
    attention, x = make("multi-scale", "encoder", max_length=512), torch.randn(1, 300, 16, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(attention(x[:, :200]).output[:, :130], attention(x).output[:, :130])


def test_decoding_keeps_the_window_of_each_group_of_heads() -> None:
    assert kept(make("multi-scale", "decoder", scales=[9, 16, 33]), 60) == 10 + 17 + 34
    assert kept(make("multi-scale", "decoder", scales=9), 60) == 10


@pytest.mark.parametrize("scales", [[3, 1], [1, 1, 3], [], "4,4"])
def test_scales_that_do_not_rise_are_refused(scales: Any) -> None:
    with pytest.raises(MtkitError, match=r"scales = .* must rise"):
        make("multi-scale", "encoder", scales=scales)


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ([1, 2, 3], "have as many numbers for each of the 2 layers"),
        ([], "have as many numbers for each of the 2 layers"),
        ([1, 2, 3, 4, 5, 6], "have one value for each of the 4 heads, or for equal shares of them"),
    ],
)
def test_tables_of_other_numbers_are_refused(table: list[int], rule: str) -> None:
    with pytest.raises(MtkitError, match=rf"widths = .* must {rule}"):
        make("multi-scale", "encoder", widths=table, layers=2)


@pytest.mark.parametrize("option", [{"scales": "1;3"}, {"scales": [1, -3]}, {"widths": 3}, {"scales": "full"}])
def test_what_is_no_list_of_widths_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(MtkitError, match=r"must be .*a list of whole numbers from 0 to"):
        make("multi-scale", "encoder", **option)


def test_the_cross_role_is_refused() -> None:
    with pytest.raises(MtkitError, match="'multi-scale' cannot play the role 'cross'"):
        make("multi-scale", "cross")
