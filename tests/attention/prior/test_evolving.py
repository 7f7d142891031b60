"""Evolving attention at its limits: neither residual nor convolution, a convolution that changes nothing, one layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.errors import MtkitError
from tests.attention.small import ROLES, VALID, maker

make = maker("evolving", layers=3)


def inputs(role: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor], Tensor]:
    """Query, memory, masks, and which rows of the query are real."""
    if role == "cross":
        return torch.randn(2, 5, 32), torch.randn(2, 7, 32), {"memory_valid": VALID}, torch.ones(2, 5).bool()
    return torch.randn(2, 7, 32), None, {"query_valid": VALID}, VALID


def delta(attention: Any) -> None:
    """Makes the convolution one that changes nothing."""
    if attention.convolution is not None:
        torch.nn.init.zeros_(attention.convolution.weight)
        attention.convolution.weight[range(4), range(4), attention.reach, attention.reach] = 1.0


def check_full(make: Callable[..., Any], role: str, **options: Any) -> None:
    """Compares three layers with three of full attention."""
    x, memory, masks, real = inputs(role)
    carry = None
    for layer in range(3):
        full, own = make(role, "full"), make(role, layer=layer, **options)
        own.adopt(full.state_dict())
        if options.get("act") == "none":
            delta(own)
        attended = own(x, memory, carry=carry, need_weights=True, **masks)
        carry = attended.carry
        wanted = full(x, memory, need_weights=True, **masks)
        torch.testing.assert_close(attended.output[real], wanted.output[real], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            attended.weights.transpose(1, 2)[real], wanted.weights.transpose(1, 2)[real], rtol=1e-5, atol=1e-5
        )


def check_same_map(make: Callable[..., Any], role: str, **options: Any) -> None:
    """Compares the maps of the second and third layer with the first's."""
    x, memory, masks, real = inputs(role)
    first = make(role, layer=0)(x, memory, need_weights=True, **masks)
    carry = first.carry
    for layer in (1, 2):
        own = make(role, layer=layer, **options)
        if options.get("act") == "none":
            delta(own)
        attended = own(torch.randn_like(x), memory, carry=carry, need_weights=True, **masks)
        carry = attended.carry
        torch.testing.assert_close(attended.weights.transpose(1, 2)[real], first.weights.transpose(1, 2)[real])


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_with_alpha_and_beta_0_every_layer_is_full_attention(role: str) -> None:
    check_full(make, role, alpha=0.0, beta=0.0)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_with_a_delta_kernel_alone_every_layer_is_full_attention(role: str) -> None:
    check_full(make, role, alpha=0.0, beta=1.0, act="none")


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_with_alpha_1_and_beta_0_every_layer_has_the_map_of_the_first(role: str) -> None:
    check_same_map(make, role, alpha=1.0, beta=0.0)


@torch.no_grad()
def test_weighing_the_map_below_and_the_convolution_are_two_options() -> None:
    x = torch.randn(2, 7, 32)
    carry = make("encoder")(x).carry
    plain = make("encoder", layer=1, alpha=0.0, beta=0.0)
    other = make("encoder")(torch.randn(2, 7, 32)).carry
    for options, reads in (({"alpha": 0.5, "beta": 0.0}, True), ({"alpha": 0.0, "beta": 0.5}, False)):
        own = make("encoder", layer=1, **options)
        own.load_state_dict(plain.state_dict())
        assert torch.equal(own(x, carry=carry).output, own(x, carry=other).output) != reads
        assert not torch.allclose(own(x, carry=carry).output, plain(x, carry=carry).output, atol=1e-4)


@pytest.mark.parametrize("beta", [-0.1, 1.1])
def test_a_beta_that_is_no_share_is_refused(beta: float) -> None:
    with pytest.raises(MtkitError, match="beta"):
        make("encoder", beta=beta)
