import pytest
import torch
from torch import Tensor

from mtkit.model import sublayers
from mtkit.model.sublayers import POOL_ELEMENTS, Dropout, forget_pools


def masks(share: float, count: int, size: int) -> Tensor:
    dropout = Dropout(share)
    return torch.stack([dropout(torch.ones(size)) for _ in range(count)])


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_share_of_zeros_and_the_mean_are_as_promised(share: float) -> None:
    torch.manual_seed(0)
    drawn = masks(share, 50, 20_000)
    deviation = (share * (1 - share) / drawn.numel()) ** 0.5
    assert abs(float((drawn == 0).float().mean()) - share) < 5 * deviation
    assert drawn[drawn != 0].unique().tolist() == [pytest.approx(1 / (1 - share))]


def test_masks_of_several_calls_and_places_are_independent() -> None:
    torch.manual_seed(0)
    centred = (masks(0.5, 200, 4_000) == 0).float() - 0.5
    between = (centred @ centred.t() / 4_000).triu(1)
    # of 19,900 pairs, some stretches may overlap in the pool; in the same place as another none does
    assert float(between.abs().max()) < 5 * 0.25 / 4_000**0.5
    neighbours = (centred[:, 1:] * centred[:, :-1]).mean()
    assert abs(float(neighbours)) < 5 * 0.25 / 800_000**0.5


def test_masks_are_a_function_of_the_seed() -> None:
    torch.manual_seed(3)
    first = masks(0.3, 4, 100)
    torch.manual_seed(3)
    assert torch.equal(masks(0.3, 4, 100), first)
    assert len(first.unique(dim=0)) == 4


def test_the_gradient_has_the_mask_of_the_forward_pass() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 40, requires_grad=True)
    out = Dropout(0.4)(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad * x, out)
    assert 0 < int((x.grad == 0).sum()) < x.numel()


@pytest.mark.parametrize("size", [POOL_ELEMENTS // 2, POOL_ELEMENTS // 2 + 1])
def test_large_tensors_are_dropped_from_as_well(size: int) -> None:
    assert float((Dropout(0.25)(torch.ones(size)) == 0).float().mean()) == pytest.approx(0.25, abs=0.002)


def test_nothing_happens_outside_training_nor_without_a_share() -> None:
    x = torch.randn(5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_a_pool_that_was_forgotten_is_drawn_again_the_same() -> None:
    dropout, x, found = Dropout(0.3), torch.ones(100), []
    for _ in range(2):
        torch.manual_seed(4)
        found.append(dropout(x))
        forget_pools()
        assert sublayers._pool.cache_info().currsize == 0
    assert torch.equal(*found)


def test_all_types_share_one_pool_of_bytes() -> None:
    forget_pools()
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        torch.manual_seed(4)
        found.append(Dropout(0.2)(torch.ones(20, 50, dtype=dtype)))
        assert found[-1].dtype == dtype
    assert all(torch.equal(x.float() != 0, found[0] != 0) for x in found)
    assert found[0].unique().tolist() == [0.0, 1.25]
    assert sublayers._pool.cache_info().currsize == 1
    assert sublayers._pool(0.2).nbytes == POOL_ELEMENTS


def test_a_result_may_be_overwritten_and_has_second_derivatives() -> None:
    def compute(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return Dropout(0.4)(x * x).add_(1.0) * x

    assert torch.autograd.gradgradcheck(compute, torch.randn(2, 5, dtype=torch.float64, requires_grad=True))
