"""Norms that are computed again: the same gradients to the last bit, and outputs that no graph holds."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mtkit.model.recomputed_norms import Recomputed, norms_recomputed
from mtkit.model.sublayers import LayerNorm

CPU = torch.device("cpu")


def rows() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs that backward passes computed again, once for each use."""
    found, use = list[Tensor](), Recomputed.use
    monkeypatch.setattr(Recomputed, "use", lambda self: found.append(use(self)) or found[-1])
    return found


def reads_twice(normed: Tensor, linear: nn.Linear) -> Tensor:
    return linear(normed) * linear(normed[:, 1:]).sum()


def overwrites(normed: Tensor, linear: nn.Linear) -> Tensor:
    return linear(normed.mul_(3.0))


def views(normed: Tensor, linear: nn.Linear) -> Tensor:
    return linear(normed.transpose(0, 1).flatten(1).view(10, 8)) + normed.square().sum()


@pytest.mark.parametrize("reader", [reads_twice, overwrites, views])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_bits(reader: Callable[..., Tensor], dtype: torch.dtype) -> None:
    norm, linear, found = LayerNorm(8), nn.Linear(8, 8).to(dtype), []
    nn.init.normal_(norm.weight)
    for device in (torch.device("cuda"), CPU):
        x = rows()
        with norms_recomputed(device):
            output = reader(norm(x.to(dtype)), linear)
        found.append(torch.autograd.grad(output.float().square().sum(), [x, *norm.parameters(), *linear.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("device", "held"), [(CPU, False), (torch.device("cuda"), True)])
def test_no_graph_holds_an_output_that_linear_maps_read(device: torch.device, held: bool) -> None:
    norm, maps = LayerNorm(8), [nn.Linear(8, 4) for _ in range(3)]
    with norms_recomputed(device):
        normed = norm(rows())
        outputs = [linear(normed) for linear in maps]
    storage = weakref.ref(normed.untyped_storage())
    del normed
    assert (storage() is not None) is held
    assert len(outputs) == 3


def test_all_uses_in_a_pass_share_one_computation(computed: list[Tensor]) -> None:
    norm, maps = LayerNorm(8), [nn.Linear(8, 4) for _ in range(3)]
    with norms_recomputed(CPU):
        normed = norm(rows())
        total = torch.stack([linear(normed).square().sum() for linear in maps]).sum()
    total.backward(retain_graph=True)
    assert len(computed) == 3
    assert len({x.data_ptr() for x in computed}) == 1
    assert torch.equal(computed[0], normed)
    first = maps[0].weight.grad.clone()
    total.backward()
    assert torch.equal(maps[0].weight.grad, 2 * first)


def test_second_derivatives_pass_through() -> None:
    norm, linear = LayerNorm(4).double(), nn.Linear(4, 3).double()

    def compute(x: Tensor) -> Tensor:
        with norms_recomputed(CPU):
            return linear(norm(x)).square()

    assert torch.autograd.gradgradcheck(compute, torch.randn(2, 4, dtype=torch.float64, requires_grad=True))


def test_an_operation_that_is_not_used_frees_its_own_output() -> None:
    """An operation may keep its output for a backward pass that does not come."""
    x = rows()
    with norms_recomputed(CPU):
        unused = x.exp()
    kept = weakref.ref(unused)
    del unused
    gc.collect()
    assert kept() is None
