"""Random features by a loop against PyTorch's operations."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention import build
from mtkit.attention.kernels.cpu.product_tiles import FLOATS, has
from mtkit.attention.kernels.cpu.random_feature_loops import ROWS, features_of_rows, laid_out_directions
from mtkit.attention.linear.performer import positive

pytestmark = pytest.mark.skipif(not has(FLOATS), reason="needs AVX2")

SHAPES = [(1, 1, 1, 1, 1), (2, 3, 4, 8, 16), (3, 1, ROWS + 5, 64, 266), (1, 4, 2 * ROWS, 7, 33)]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_features_are_those_of_the_plain_operations(shape: tuple[int, ...], own: bool) -> None:
    segments, heads, length, width, count = shape
    x, directions = torch.randn(segments, heads, length, width), torch.randn(heads if own else 1, count, width)
    products, weights = x @ directions.mT, laid_out_directions(directions)
    expected = positive(products, x.square().sum(-1, keepdim=True) / 2)
    features, scale = features_of_rows(x, weights, count, waves=False, factor=count**-0.5)
    torch.testing.assert_close(features, expected.features, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(scale, expected.scale, rtol=1e-5, atol=1e-4)
    waves, _ = features_of_rows(x, weights, count, waves=True, factor=0.5)
    angles = F.normalize(x, dim=-1, eps=1e-6) @ directions.mT
    torch.testing.assert_close(waves, torch.cat([angles.sin(), angles.cos()], -1) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(number: float) -> None:
    x, weights = torch.randn(2, 3, 4, 8), laid_out_directions(torch.randn(1, 20, 8))
    expected, _ = features_of_rows(x, weights, 20, waves=False, factor=1.0)
    x[1, 2, 3, 4] = number
    features, scale = features_of_rows(x, weights, 20, waves=False, factor=1.0)
    assert not scale[1, 2, 3].isfinite() or features[1, 2, 3].isnan().any()
    features[1, 2, 3] = expected[1, 2, 3]
    assert torch.equal(features, expected)


@pytest.mark.parametrize("options", [{}, {"features": 20}])
@pytest.mark.parametrize(
    ("name", "role"),
    [("performer", "decoder"), ("performer", "cross"), ("rfa", "decoder"), ("rfa", "cross"), ("rfa-gated", "decoder")],
)
def test_steps_by_the_loop_are_the_forward_pass(name: str, role: str, options: dict[str, Any]) -> None:
    attention = build(name, role=role, d_model=32, heads=4, **options).eval()
    tokens, memory = torch.randn(3, 9, 32), torch.randn(3, 5, 32) if role == "cross" else None
    valid = None if memory is None else torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    with torch.no_grad():
        expected = attention(tokens, memory, memory_valid=valid).output
    outputs: list[Tensor] = []
    with torch.inference_mode():
        state, _ = attention.start(3, memory, valid, hypotheses=2)
        for t in range(9):
            attended, state = attention.step(tokens[:, t : t + 1].expand(-1, 2, -1), state)
            outputs.append(attended.output)
    torch.testing.assert_close(
        torch.stack(outputs, 2), expected.unsqueeze(1).expand(-1, 2, -1, -1), rtol=1e-4, atol=1e-4
    )
