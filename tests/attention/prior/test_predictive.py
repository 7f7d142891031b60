"""Predictive attention at its limits: this layer's scores alone, and the map below alone."""

import pytest
import torch

from tests.attention.prior.test_evolving import check_full, check_same_map
from tests.attention.small import ROLES, maker

make = maker("predictive", layers=3)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_with_alpha_1_every_layer_is_full_attention(role: str) -> None:
    check_full(make, role, alpha=1.0)


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_with_alpha_0_and_a_delta_kernel_every_layer_has_the_map_below(role: str) -> None:
    check_same_map(make, role, alpha=0.0, act="none")


@torch.no_grad()
def test_the_prediction_alone_never_reads_this_layers_queries() -> None:
    own, x = make("decoder", layer=1, alpha=0.0), torch.randn(2, 7, 32)
    carry = make("decoder")(x).carry
    before = own(x, carry=carry).output
    torch.nn.init.normal_(own.q_proj.weight)
    torch.testing.assert_close(own(x, carry=carry).output, before)
