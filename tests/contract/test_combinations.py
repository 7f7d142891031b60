"""The merge by routing and the regulariser of disagreement, together, around full, longformer and multi-query heads."""

from typing import Any

import pytest
import torch

from mtkit.attention import ROLES, Attention, build
from mtkit.attention.registry import find

HEADS = {"merge": {"name": "em-routing", "iterations": 2}, "regularizer": {"name": "disagreement", "types": "output"}}
AROUND: dict[str, dict[str, Any]] = {
    "full": {},
    "longformer": {"window_radius": 3, "global_tokens": 1},
    "multi-query": {},
}
PAIRS = [(name, role) for name in AROUND for role in ROLES if role in find(name).roles]


def make(name: str, role: str, **slots: Any) -> Attention:
    torch.manual_seed(3)
    return build(name, role=role, d_model=32, heads=4, max_length=64, **AROUND[name], **slots)


@pytest.mark.parametrize(("name", "role"), PAIRS)
def test_both_slots_work_at_once(name: str, role: str) -> None:
    """Outputs and gradients are those of the naive form, the loss is there in training, and each slot does its part."""
    attention = make(name, role, **HEADS).double()
    x, memory = torch.randn(2, 13, 32).double(), torch.randn(2, 9, 32).double() if role == "cross" else None
    results = {}
    for form in ("forward", "naive"):
        ours = x.clone().requires_grad_()
        output = getattr(attention, form)(ours, memory).output
        results[form] = (output, *torch.autograd.grad(output.square().sum(), ours))
    torch.testing.assert_close(results["forward"], results["naive"], rtol=1e-8, atol=1e-9)
    losses = attention.train()(x, memory).losses
    assert losses["disagreement"].isfinite()
    merged = make(name, role, merge=HEADS["merge"]).double()
    merged.load_state_dict(attention.state_dict())
    torch.testing.assert_close(merged(x, memory).output, results["forward"][0], rtol=0.0, atol=0.0)
    assert not merged(x, memory).losses


@pytest.mark.parametrize(("name", "role"), [pair for pair in PAIRS if pair[1] != "encoder"])
def test_steps_with_both_give_what_forward_gives(name: str, role: str) -> None:
    attention = make(name, role, **HEADS).double().eval()
    x, memory = torch.randn(2, 13, 32).double(), torch.randn(2, 9, 32).double() if role == "cross" else None
    state, _ = attention.start(2, memory, hypotheses=1)
    outputs = []
    for token in x.split(1, dim=1):
        attended, state = attention.step(token, state)
        outputs.append(attended.output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), attention(x, memory).output, rtol=1e-8, atol=1e-9)
