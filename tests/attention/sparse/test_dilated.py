"""The dilated window: the catalogue's equation, its limits, a dilation for each head, and what decoding keeps."""

import pytest

from mtkit.errors import MtkitError
from tests.attention.sparse.literal import agrees, is_full, is_own_value, kept, make, reached

ROLES = ["encoder", "decoder"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("radius", "dilation"), [(3, 2), (2, 7), (0, 3), (30, 3), (5, [1, 2, 2, 4]), (2, [1, 6]), (4, [3, 1, 3, 1])]
)
def test_it_is_the_equation(role: str, radius: int, dilation: int | list[int]) -> None:
    each = dilation if isinstance(dilation, list) else [dilation] * 4
    each = [each[head * len(each) // 4] for head in range(4)]
    attention = make("dilated", role, window_radius=radius, dilation=dilation)
    agrees(attention, lambda head, i, j: j in [i + t * each[head] for t in range(-radius, radius + 1)])


@pytest.mark.parametrize("role", ROLES)
def test_without_gaps_and_wide_it_is_full_attention_and_with_the_widest_gaps_the_own_value(role: str) -> None:
    is_full(make("dilated", role, window_radius=36, dilation=1))
    is_own_value(make("dilated", role, window_radius=5, dilation=37))


@pytest.mark.parametrize("role", ROLES)
def test_remainders_never_mix(role: str) -> None:
    steps = {-8, -4, 0, 4, 8} if role == "encoder" else {0, 4, 8}
    assert reached(make("dilated", role, window_radius=2, dilation=4), 31) == {31 + step for step in steps}


def test_decoding_keeps_the_reach_of_each_group_of_heads() -> None:
    assert kept(make("dilated", "decoder", window_radius=9, dilation=4), 60) == 9 * 4 + 1
    assert kept(make("dilated", "decoder", window_radius=9, dilation=[1, 1, 1, 4]), 60) == (9 + 1) + (9 * 4 + 1)


def test_dilations_may_be_one_text_with_commas() -> None:
    """As `--attention-option dilation=1,3` gives them."""
    assert reached(make("dilated", "decoder", window_radius=1, dilation="1,3"), 20) == {20, 21, 23}


@pytest.mark.parametrize("dilation", ["1;2", "1,", "1,0,1,1", ",1"])
def test_text_that_is_no_list_of_dilations_is_refused(dilation: str) -> None:
    with pytest.raises(MtkitError, match=r"dilation = .* must be .* a list of whole numbers from 1 to"):
        make("dilated", "encoder", dilation=dilation)


@pytest.mark.parametrize("dilation", [[1, 2, 1], [1, 2, 3, 4, 5], []])
def test_dilations_are_those_of_equal_shares_of_the_heads(dilation: list[int]) -> None:
    with pytest.raises(MtkitError, match="must have one value for each of the 4 heads, or for equal shares of them"):
        make("dilated", "encoder", dilation=dilation)
    with pytest.raises(MtkitError, match=r"a list of whole numbers from 1 to .*, one for each head"):
        make("dilated", "encoder", dilation=[1, 2, 0, 1])
