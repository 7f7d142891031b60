"""Sliding-window attention: its limits, and what it must not see."""

import pytest
import torch

from mtkit.attention import build
from mtkit.errors import MtkitError


def make(radius: int | list[int], role: str = "encoder", **site: int) -> torch.nn.Module:
    return build("band", role=role, d_model=16, heads=2, window_radius=radius, **site).eval()


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("length", [1, 2, 31, 129, 200])
@torch.no_grad()
def test_a_radius_of_the_whole_length_is_full_attention(role: str, length: int) -> None:
    band, full = make(length - 1, role), build("full", role=role, d_model=16, heads=2).eval()
    full.load_state_dict(band.state_dict())
    x = torch.randn(2, length, 16)
    torch.testing.assert_close(band(x).output, full(x).output, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@torch.no_grad()
def test_a_radius_of_zero_is_the_own_value(role: str) -> None:
    band, x = make(0, role), torch.randn(2, 70, 16)
    torch.testing.assert_close(band(x).output, band.out_proj(band.v_proj(x)), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("role", "reach"), [("encoder", range(-5, 6)), ("decoder", range(6))])
@torch.no_grad()
def test_a_token_reaches_its_window_and_nothing_else(role: str, reach: range) -> None:
    band, x = make(5, role), torch.randn(1, 100, 16)
    for position in (0, 31, 32, 50, 64, 99):
        other = x.clone()
        other[:, position] += 1
        changed = (band(other).output - band(x).output).abs().amax((0, 2)) > 0
        wanted = {position + step for step in reach} & set(range(100))
        assert set(changed.nonzero().flatten().tolist()) == wanted


@torch.no_grad()
def test_each_layer_has_the_radius_listed_for_it() -> None:
    x = torch.randn(1, 30, 16)
    for layer, radius in enumerate([2, 4, 8]):
        band = make([2, 4, 8], layer=layer, layers=3)
        weights = band(x, need_weights=True).weights
        assert (weights[0, 0, 15] > 0).sum() == 2 * radius + 1
    with pytest.raises(MtkitError, match="window_radius"):
        make([2, 4], layers=3)
