"""Choices in reversible layers: the backward pass belongs to those that the forward pass made."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attention, build
from mtkit.model import reversible
from mtkit.model.layers import StackPass, SubLayer
from mtkit.model.reversible import run_reversibly
from mtkit.model.sublayers import Stream

CHOOSING = [
    ("reformer", "encoder", {"lsh_buckets": 8, "chunk": 4, "rounds": 2}),
    ("reformer", "decoder", {"lsh_buckets": 8, "chunk": 4, "rounds": 2}),
    ("routing", "encoder", {"clusters": 4, "window": 2}),
    ("routing", "encoder", {"clusters": 4, "window": 3, "assign": "balanced"}),
    ("routing", "decoder", {"clusters": 4, "window": 2}),
    ("routing", "cross", {"clusters": 4, "window": 2}),
    ("sac", "encoder", {"edges": 2, "hidden": 8}),
    ("sac", "encoder", {"edges": 2, "hidden": 8, "scan": "sequence"}),
    ("sac", "decoder", {"edges": 2, "hidden": 8, "share": "head"}),
]
each_choosing = pytest.mark.parametrize(
    ("name", "role", "options"), CHOOSING, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.values()))
)


def make(name: str, role: str, options: dict[str, Any]) -> Attention:
    return build(name, role=role, d_model=32, heads=4, **options).train()


def memory_of(role: str) -> Tensor | None:
    return torch.randn(1, 12, 32) if role == "cross" else None


@torch.no_grad()
def near_tie(attention: Attention, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    """An input, and an error of the size of rounding that makes the output jump."""
    for _ in range(50):
        one, other = torch.randn(1, 12, 32), torch.randn(1, 12, 32)
        first, last = (attention(each, memory).output for each in (one, other))
        while (other - one).abs().max() > 1e-6:  # always to the half that moves the output more
            middle = (one + other) / 2
            half = attention(middle, memory).output
            if (half - first).norm() > (last - half).norm():
                other, last = middle, half
            else:
                one, first = middle, half
        if (attention(one + (other - one), memory).output - first).norm() > 0.1:
            return one, other - one
    raise AssertionError("no near tie")


def results(attention: Attention, attended: Tensor, log_prob: Tensor | None, x: Tensor) -> list[Tensor]:
    """Gradients with respect to the input and all parameters."""
    objective = (attended * torch.linspace(-1, 1, attended.numel()).view_as(attended)).sum()
    if log_prob is not None:
        objective = objective + log_prob.sum()
    wanted = [x, *attention.parameters()]
    gradients = torch.autograd.grad(objective, wanted, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, gradients, strict=True)]


def kept(attention: Attention, x: Tensor, memory: Tensor | None) -> list[Tensor]:
    attended = attention(x.requires_grad_(), memory)
    return results(attention, attended.output, attended.log_prob, x)


def passed(attention: Attention, x: Tensor, memory: Tensor | None, error: Tensor | float = 0.0) -> Any:
    """One reversible sub-layer, whose second run reads its input with an error."""
    times = []

    def run(stream: Stream, stack_pass: StackPass, memory: Tensor | None) -> Stream:
        times.append(None)
        read = stream[1] if len(times) == 1 else stream[1] + error
        attended = attention(read, memory)
        stack_pass.add(attended.losses, attended.log_prob)
        return stream[1], stream[0] + attended.output

    stack_pass = StackPass()
    _, output = run_reversibly([SubLayer(run, (attention,))], x.requires_grad_(), stack_pass, memory)
    return output, stack_pass.log_prob


def rebuilt(attention: Attention, x: Tensor, memory: Tensor | None, error: Tensor) -> list[Tensor]:
    output, log_prob = passed(attention, x, memory, error)
    return results(attention, output - x, log_prob, x)


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / (b.norm() + 1)) for a, b in zip(ours, theirs, strict=True))


@each_choosing
def test_rounding_moves_no_choice(name: str, role: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, memory = make(name, role, options), memory_of(role)
    x, error = near_tie(attention, memory)
    expected = kept(attention, x, memory)
    assert distance(rebuilt(attention, x, memory, error), expected) < 1e-4
    monkeypatch.setattr(reversible, "replay_choices", lambda kept: nullcontext())
    assert distance(rebuilt(attention, x, memory, error), expected) > 1e-2, "another function's gradient"


@each_choosing
def test_passes_in_flight_do_not_meet(name: str, role: str, options: Any) -> None:
    """Two batches, both forwards before both backwards, which come in the same order or in reverse."""
    attention, memory = make(name, role, options), memory_of(role)
    ties = [near_tie(attention, memory) for _ in range(2)]
    expected = [kept(attention, x, memory) for x, _ in ties]
    for order in ((0, 1), (1, 0)):
        out = [passed(attention, x, memory, error) for x, error in ties]
        for n in order:
            (output, log_prob), (x, _) = out[n], ties[n]
            assert distance(results(attention, output - x, log_prob, x), expected[n]) < 1e-4


@each_choosing
def test_choices_take_a_byte_each_and_go_with_what_autograd_saved(name: str, role: str, options: Any) -> None:
    attention, memory = make(name, role, options), memory_of(role)
    chosen: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            assert tensor.dtype == torch.uint8
            chosen.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = passed(attention, torch.randn(1, 12, 32), memory)
    assert chosen
    assert all(each() is not None for each in chosen)
    output.sum().backward(retain_graph=True)
    output.sum().backward()
    assert all(each() is None for each in chosen), "although the output is still there"
