"""Blocks of queries give what all queries at once give, forward and backward, in less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import build, mechanisms
from mtkit.attention.bases import query_blocks
from mtkit.attention.bases.query_blocks import QueryBlocks
from tests.contract.counting import count

NAMES = [name for name, each in mechanisms().items() if issubclass(each.kind, QueryBlocks)]
CASES = [(name, role) for name in NAMES for role in sorted(mechanisms()[name].roles)]
on_all = pytest.mark.parametrize(("name", "role"), CASES)


def make(name: str, role: str, **arguments: Any) -> Any:
    attention = build(name, role=role, d_model=32, heads=4, **arguments).double().eval()
    for parameter in attention.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return attention


def blocks_of(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(query_blocks, "LEAST", size)
    monkeypatch.setattr(query_blocks, "scores_at_once", lambda device: 1)


def test_there_are_mechanisms_in_blocks() -> None:
    assert {"forgetting", "sigmoid", "sink", "topk"} <= set(NAMES)


@on_all
@pytest.mark.parametrize("positions", [None, "shaw"])
def test_blocks_change_neither_outputs_nor_gradients(
    name: str, role: str, positions: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if positions and (role == "cross" or "positions" not in mechanisms()[name].kind.slots):
        return
    attention = make(name, role, positions=positions)
    x, memory = torch.randn(2, 37, 32).double(), torch.randn(2, 41, 32).double() if role == "cross" else None
    valid = torch.arange(41 if role == "cross" else 37) < torch.tensor([[30], [37]])
    masks = {"memory_valid" if role == "cross" else "query_valid": valid}
    results = []
    for size in (9, 64):
        blocks_of(monkeypatch, size)
        inputs = [each.clone().requires_grad_() for each in (x, memory) if each is not None]
        output = attention(*inputs, **masks).output
        wanted = [*inputs, *attention.parameters()]
        results.append((output, *torch.autograd.grad(output.square().sum(), wanted)))
        with torch.no_grad():
            torch.testing.assert_close(attention(x, memory, **masks).output, output)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_the_backward_pass_repeats_the_dropout_of_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope along the gradient of the values' map is its squared length."""
    attention, x = make(name, "decoder", dropout=0.3).train(), torch.randn(2, 37, 32).double()
    blocks_of(monkeypatch, 9)

    def loss() -> Tensor:
        torch.manual_seed(3)
        total: Tensor = attention(x).output.square().sum()
        return total

    weight = attention.v_proj.weight
    (gradient,) = torch.autograd.grad(loss(), weight)
    before, ends = weight.detach().clone(), []
    for way in (1e-6, -1e-6):
        weight.data.copy_(before + way * gradient)
        ends.append(loss().detach())
    torch.testing.assert_close((ends[0] - ends[1]) / 2e-6, gradient.square().sum(), rtol=1e-5, atol=1e-6)


@on_all
def test_scores_of_all_pairs_are_not_held(name: str, role: str) -> None:
    attention = make(name, role).float()
    x, memory = torch.randn(1, 1024, 32), torch.randn(1, 1024, 32) if role == "cross" else None
    counted, _ = count(lambda: attention(x, memory).output.sum().backward())
    assert counted.largest < 1024 * 1024
