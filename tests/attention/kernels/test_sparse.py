"""The engine against a dense mask, for patterns of all kinds and at every border."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mtkit.attention.contract import Site
from mtkit.attention.kernels.dot_product import attend
from mtkit.attention.kernels.pattern import Band, Blocks, Columns, Comb, Flanked, Pattern, Rows, global_tokens
from mtkit.attention.kernels.picked_blocks import block_size
from mtkit.attention.kernels.random_pattern import LastBlocks, LastRows, Random, RandomBlocks
from mtkit.attention.kernels.sparse import dense_attend, sparse_attend
from mtkit.attention.positions import POSITIONS
from tests.contract.counting import count, exponent

HEADS, WIDTH = 4, 6
LENGTHS = [1, 2, 5, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 97, 130, 200]


def inputs(batch: int, groups: int, length: int) -> list[Tensor]:
    """Queries, keys and values in float64."""
    shapes = [(batch, HEADS, length, WIDTH), (batch, groups, length, WIDTH), (batch, groups, length, WIDTH - 1)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dense(pattern: Pattern, length: int, causal: bool, valid: Tensor | None) -> Tensor:
    """The mask (B or 1, H or 1, T, T), pair by pair."""
    at = torch.arange(length)
    seen = pattern.sees(at.unsqueeze(-1), at)
    if causal:
        return seen & (at <= at.unsqueeze(-1))
    return seen if valid is None else seen & valid[:, None, None]


def random_blocks(draw: random.Random, lengths: Tensor | None) -> Pattern:
    last = 0 if lengths is None else draw.randint(0, 1)
    blocks = draw.choice([2, 8])
    return RandomBlocks(2, HEADS, draw.randint(0, 99), blocks, draw.randint(0, 2), draw.randint(0, 1), last, lengths)


def random_pattern(draw: random.Random, causal: bool, lengths: Tensor) -> Pattern:
    """A union of one to four members of any kinds."""
    kinds: list[Callable[[], Pattern]] = [
        lambda: Band(draw.randint(0, 12), draw.randint(0, 12), draw.choice([1, 1, 2, 3])),
        lambda: Band(None, None, draw.choice([2, 5])),
        lambda: Blocks(draw.choice([1, 3, 8, 32, 40]), draw.randint(0, 2), draw.randint(0, 2)),
        lambda: Flanked(draw.choice([1, 3, 8, 40]), draw.randint(0, 9), draw.randint(0, 9)),
        lambda: Columns(draw.randint(1, 3)),
        lambda: global_tokens(draw.randint(1, 3)),
        lambda: Rows(draw.randint(1, 3)),
        lambda: Comb(draw.choice([3, 7]), draw.randint(0, 2), draw.randint(1, 2)),
        lambda: Random(4, draw.choice([1, HEADS]), draw.randint(0, 99), None if causal else lengths),
        lambda: random_blocks(draw, None if causal else lengths),
    ]
    pattern = draw.choice(kinds)()
    for _ in range(draw.randint(0, 3)):
        pattern = pattern | draw.choice(kinds)()
    return pattern


@pytest.mark.parametrize("seed", range(12))
def test_any_union_gives_what_a_dense_mask_gives(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(10):
        length, batch, causal = draw.choice(LENGTHS), draw.choice([1, 3]), draw.random() < 0.5
        lengths = torch.randint(1, length + 1, (batch,))
        lengths[0] = length
        valid = torch.arange(length) < lengths.unsqueeze(1)
        pattern = random_pattern(draw, causal, lengths)
        q, k, v = inputs(batch, draw.choice([1, 2, 4]), length)
        heads, _ = sparse_attend(q, k, v, pattern, scale=0.3, causal=causal, valid=valid)
        wanted, _ = dense_attend(q, k, v, dense(pattern, length, causal, valid), 0.3)
        weight = torch.randn_like(heads) * valid[:, None, :, None]  # what stands at padding is nobody's
        gradients = (torch.autograd.grad((each * weight).sum(), [q, k, v]) for each in (heads, wanted))
        message = f"{pattern}, length {length}, causal {causal}"
        torch.testing.assert_close(heads * weight, wanted * weight, atol=1e-10, rtol=0, msg=message)
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=0, msg=message)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [Band(None, None, 5), Band(3, None, 40)],
    ids=["strided", "one-step"],
)
def test_whole_streams_give_what_a_dense_mask_gives(pattern: Pattern, causal: bool) -> None:
    for length in (1, 4, 33, 97):
        lengths = torch.tensor([length, max(length - 9, 0)])
        valid = torch.arange(length) < lengths.unsqueeze(1)
        q, k, v = inputs(2, 2, length)
        heads, _ = sparse_attend(q, k, v, pattern, scale=0.3, causal=causal, valid=valid)
        wanted, _ = dense_attend(q, k, v, dense(pattern, length, causal, valid), 0.3)
        weight = torch.randn_like(heads) * valid[:, None, :, None]
        torch.testing.assert_close(heads * weight, wanted * weight, atol=1e-10, rtol=0)
        gradients = (torch.autograd.grad((each * weight).sum(), [q, k, v]) for each in (heads, wanted))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def pattern_in_blocks(draw: random.Random, causal: bool, lengths: Tensor) -> Pattern:
    """A union of picked blocks and whole blocks of the same size."""
    size, key = draw.choice([1, 2, 5, 16]), draw.randint(0, 99)
    given = None if causal else lengths
    heads = draw.choice([1, HEADS])
    pattern: Pattern = Random(4, heads, key, given) if size == 1 else RandomBlocks(2, heads, key, size, 2, 1, 0, given)
    kinds: list[Callable[[], Pattern]] = [
        lambda: Blocks(size, draw.randint(0, 2), draw.randint(0, 2)),
        lambda: Columns(draw.randint(1, 2) * size),
        lambda: global_tokens(draw.randint(1, 2) * size),
    ]
    if not causal:
        kinds += [
            lambda: LastBlocks(draw.randint(1, 2), heads, 0, size, lengths),
            lambda: LastRows(draw.randint(1, 2), size, lengths),
        ]
    for _ in range(draw.randint(0, 3)):
        pattern = pattern | draw.choice(kinds)()
    return pattern


@pytest.mark.parametrize("seed", range(12))
def test_a_union_of_picked_blocks_gives_what_a_dense_mask_gives(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(10):
        length, batch, causal = draw.choice(LENGTHS), draw.choice([1, 3]), draw.random() < 0.5
        lengths = torch.randint(0, length + 1, (batch,))
        lengths[0] = length
        valid = torch.arange(length) < lengths.unsqueeze(1)
        pattern = pattern_in_blocks(draw, causal, lengths)
        assert block_size(pattern) is not None
        q, k, v = inputs(batch, draw.choice([1, 2, 4]), length)
        heads, _ = sparse_attend(q, k, v, pattern, scale=0.3, causal=causal, valid=valid)
        wanted, _ = dense_attend(q, k, v, dense(pattern, length, causal, valid), 0.3)
        weight = torch.randn_like(heads) * valid[:, None, :, None]
        gradients = (torch.autograd.grad((each * weight).sum(), [q, k, v]) for each in (heads, wanted))
        message = f"{pattern}, length {length}, causal {causal}"
        torch.testing.assert_close(heads * weight, wanted * weight, atol=1e-10, rtol=0, msg=message)
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=0, msg=message)


def test_last_blocks_are_those_of_each_segment() -> None:
    lengths, at = torch.tensor([23, 8, 3, 0]), torch.arange(24)
    columns = LastBlocks(1, HEADS, 0, 4, lengths).sees(at.unsqueeze(-1), at)
    rows = LastRows(1, 4, lengths).sees(at.unsqueeze(-1), at)
    for segment, last in enumerate([range(20, 24), range(4, 8), range(4), range(0)]):
        keys = torch.tensor([j in last for j in range(24)])
        assert torch.equal(columns[segment], keys.expand(HEADS, 24, 24))
        real = range(int(lengths[segment]))
        assert torch.equal(rows[segment, 0, real], keys[: len(real), None].expand(-1, 24))


def test_drawn_keys_may_be_those_of_another_sequence() -> None:
    lengths = torch.tensor([17, 6])
    valid = torch.arange(17) < lengths.unsqueeze(1)
    q, (_, k, v) = inputs(2, HEADS, 9)[0], inputs(2, 2, 17)
    for pattern in (Random(3, HEADS, 5, lengths), RandomBlocks(2, HEADS, 5, block=3, lengths=lengths)):
        heads, _ = sparse_attend(q, k, v, pattern, scale=0.3, valid=valid)
        seen = pattern.sees(torch.arange(9).unsqueeze(-1), torch.arange(17))
        wanted, _ = dense_attend(q, k, v, seen & valid[:, None, None], 0.3)
        torch.testing.assert_close(heads, wanted)
        torch.testing.assert_close(
            sparse_attend(q, k, v, pattern, scale=0.3, valid=valid, need_weights=True)[0], wanted
        )


@pytest.mark.parametrize("length", [130, 257, 700])
@pytest.mark.parametrize("causal", [False, True])
def test_wide_windows_cross_every_block_border(length: int, causal: bool) -> None:
    pattern, (q, k, v) = Band(128, 128) | Columns(2), inputs(2, 2, length)
    valid = torch.arange(length) < torch.tensor([[length], [length - 65]])
    heads, _ = sparse_attend(q, k, v, pattern, scale=0.3, causal=causal, valid=valid)
    wanted, _ = dense_attend(q, k, v, dense(pattern, length, causal, valid), 0.3)
    torch.testing.assert_close(heads[0], wanted[0])
    torch.testing.assert_close(heads[1, :, : length - 65], wanted[1, :, : length - 65])


def test_a_key_of_several_members_counts_once() -> None:
    q, k, v = inputs(1, HEADS, 100)
    once, _ = sparse_attend(q, k, v, Band(5, 5), scale=0.3)
    twice, _ = sparse_attend(q, k, v, Band(5, 5) | Band(2, 2) | Band(1, 1, dilation=3) | Blocks(1), scale=0.3)
    torch.testing.assert_close(once, twice)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        Band(5, 3),
        Band(2, 2, dilation=3) | global_tokens(2),
        Band(1, 1) | Comb(6, 4, 2) | Random(2, HEADS, 3, torch.tensor([150, 113])),
    ],
    ids=["band", "dilated", "random"],
)
def test_relative_positions_are_those_of_the_tokens(name: str, causal: bool, pattern: Pattern) -> None:
    positions = POSITIONS[name](Site("encoder", HEADS * WIDTH, HEADS), WIDTH).double()
    for parameter in positions.parameters():
        torch.nn.init.normal_(parameter)
    q, k, v = inputs(2, 2, 150)
    if positions.on_values:
        v = torch.randn(2, 2, 150, WIDTH, dtype=torch.float64)
    valid = torch.arange(150) < torch.tensor([[150], [113]])
    heads, _ = sparse_attend(q, k, v, pattern, scale=0.3, causal=causal, valid=valid, positions=positions)
    wanted, _ = dense_attend(q, k, v, dense(pattern, 150, causal, valid), 0.3, positions)
    torch.testing.assert_close(heads[0], wanted[0])
    torch.testing.assert_close(heads[1, :, :113], wanted[1, :, :113])


def test_weights_are_those_of_the_outputs() -> None:
    q, k, v = inputs(2, 2, 50)
    pattern = Band(3, 3) | global_tokens(1)
    heads, weights = sparse_attend(q, k, v, pattern, scale=0.3, need_weights=True)
    assert weights is not None
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), heads)
    torch.testing.assert_close(heads, sparse_attend(q, k, v, pattern, scale=0.3)[0])


def test_with_nothing_to_see_the_result_is_zero_and_so_are_its_gradients() -> None:
    q, k, v = inputs(2, HEADS, 70)
    valid = torch.arange(70) < torch.tensor([[70], [0]])
    heads, _ = sparse_attend(q, k, v, Band(2, 2), scale=0.3, valid=valid)
    assert heads[1].abs().max() == 0
    heads.square().sum().backward()
    for each in (q, k, v):
        assert each.grad is not None
        assert each.grad[0].abs().max() > 0
        assert each.grad[1].abs().max() == 0


@pytest.mark.parametrize(
    "parts",
    [Band(4, 4), Band(4, 4) | Band(2, 2, dilation=7), Blocks(4, 1, 1) | RandomBlocks(2, HEADS, 1, block=4)],
    ids=["one", "merged", "picked"],
)
def test_dropout_acts_on_the_probabilities(parts: Pattern) -> None:
    q, k, _ = inputs(1, HEADS, 400)
    ones = torch.ones(1, HEADS, 400, 1, dtype=torch.float64)
    kept, _ = sparse_attend(q, k, ones, parts, scale=0.3, dropout=0.5)
    assert kept.std() > 0.1  # the sums of what is left of each row
    assert abs(kept.mean() - 1) < 0.05


@pytest.mark.parametrize(
    "pattern",
    [
        Band(9, 9),
        Band(9, 9, dilation=3) | global_tokens(2),
        Blocks(8, 1, 1),
        Blocks(8, 1, 1) | RandomBlocks(2, HEADS, 1, block=8),
        Band(2, 2) | Band(3, 3, dilation=5) | Random(3, HEADS, 1),
        Blocks(1) | Random(3, HEADS, 1),
    ],
    ids=["band", "dilated-global", "blocks", "random-blocks", "merged", "random"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear_in_the_length(pattern: Pattern, causal: bool) -> None:
    def run(length: int) -> Callable[[], None]:
        q, k, v = inputs(1, HEADS, length)
        return lambda: sparse_attend(q, k, v, pattern, scale=0.3, causal=causal)[0].square().sum().backward()

    (once, flops), (twice, more_flops) = (count(run(length)) for length in (2048, 4096))
    assert exponent(once.largest, twice.largest) < 1.1
    assert exponent(once.touched, twice.touched) < 1.1
    assert exponent(flops, more_flops) < 1.1
    assert not any(sum(side >= 4096 for side in shape) > 1 for shape in twice.shapes)


def test_a_pattern_that_shows_everything_is_full_attention() -> None:
    q, k, v = inputs(2, 2, 40)
    valid = torch.arange(40) < torch.tensor([[40], [9]])
    for pattern in (Band(39, 39), Blocks(40), Columns(40), global_tokens(40), Band(None, None)):
        heads, _ = sparse_attend(q, k, v, pattern, scale=0.3, valid=valid)
        torch.testing.assert_close(heads, attend(q, k, v, scale=0.3, valid=valid)[0])
