"""The feed-forward forms against their equations."""

import pytest
import torch
from torch.nn import functional as F

from mtkit.model.sublayers import FeedForward


@pytest.mark.parametrize("activation", ["relu", "gelu", "swish", "swiglu"])
def test_each_form_is_its_equation(activation: str) -> None:
    layer = FeedForward(6, 10, activation, dropout=0.5).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 6)
    inner = x @ layer.inner.weight.T + layer.inner.bias
    if activation == "relu":
        inner = inner.clamp(min=0)
    elif activation == "gelu":
        inner = F.gelu(inner)
    elif activation == "swish":
        inner = inner * inner.sigmoid()
    else:
        gate = x @ layer.gate.weight.T + layer.gate.bias
        inner = gate * gate.sigmoid() * inner
    torch.testing.assert_close(layer(x), inner @ layer.outer.weight.T + layer.outer.bias)


def test_relu_in_place_makes_no_copies_of_gradients() -> None:
    output = FeedForward(8, 16, "relu", 0.1)(torch.randn(2, 3, 8))
    names, found = set(), [output.grad_fn]
    while found:
        node = found.pop()
        if node is not None:
            names.add(type(node).__name__)
            found += [each for each, _ in node.next_functions]
    assert "ReluBackward0" in names
    assert "CopySlices" not in names
