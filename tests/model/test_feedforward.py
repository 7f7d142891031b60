"""The feed-forward forms against their equations."""

import pytest
import torch
from torch.nn import functional as F

from mtkit.model.feedforward import FeedForward


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
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
    else:
        gate = x @ layer.gate.weight.T + layer.gate.bias
        inner = gate * gate.sigmoid() * inner
    torch.testing.assert_close(layer(x), inner @ layer.outer.weight.T + layer.outer.bias)
