"""Predictive attention at its limits: this layer's scores alone, and the map below alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build

ROLES = ["encoder", "decoder", "cross"]
VALID = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


def make(role: str, name: str = "predictive", **arguments: Any) -> Any:
    return build(name, **{"role": role, "d_model": 32, "heads": 4, "layers": 3} | arguments).eval()


def inputs(role: str) -> tuple[Tensor, Tensor | None, dict[str, Tensor], Tensor]:
    """Query, memory, masks, and which rows of the query are real."""
    if role == "cross":
        return torch.randn(2, 5, 32), torch.randn(2, 7, 32), {"memory_valid": VALID}, torch.ones(2, 5).bool()
    return torch.randn(2, 7, 32), None, {"query_valid": VALID}, VALID


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_with_alpha_1_every_layer_is_full_attention(role: str) -> None:
    x, memory, masks, real = inputs(role)
    carry = None
    for layer in range(3):
        full, own = make(role, "full"), make(role, layer=layer, alpha=1.0)
        own.adopt(full.state_dict())
        attended = own(x, memory, carry=carry, need_weights=True, **masks)
        carry = attended.carry
        wanted = full(x, memory, need_weights=True, **masks)
        torch.testing.assert_close(attended.output[real], wanted.output[real], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            attended.weights.transpose(1, 2)[real], wanted.weights.transpose(1, 2)[real], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("role", ROLES)
@torch.no_grad()
def test_with_alpha_0_and_a_delta_kernel_every_layer_has_the_map_below(role: str) -> None:
    x, memory, masks, real = inputs(role)
    first = make(role, layer=0)(x, memory, need_weights=True, **masks)
    carry = first.carry
    for layer in (1, 2):
        own = make(role, layer=layer, alpha=0.0, act="none")
        torch.nn.init.zeros_(own.convolution.weight)
        own.convolution.weight[range(4), range(4), own.reach, own.reach] = 1.0
        attended = own(torch.randn_like(x), memory, carry=carry, need_weights=True, **masks)
        carry = attended.carry
        torch.testing.assert_close(attended.weights.transpose(1, 2)[real], first.weights.transpose(1, 2)[real])


@torch.no_grad()
def test_the_prediction_alone_never_reads_this_layers_queries() -> None:
    own, x = make("decoder", layer=1, alpha=0.0), torch.randn(2, 7, 32)
    carry = make("decoder")(x).carry
    before = own(x, carry=carry).output
    torch.nn.init.normal_(own.q_proj.weight)
    torch.testing.assert_close(own(x, carry=carry).output, before)
