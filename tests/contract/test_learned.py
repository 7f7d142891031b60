"""What a mechanism has learned: a row per head, means over real tokens alone, and nothing but saved numbers in it."""

from dataclasses import replace

import torch
from torch import Tensor

from mtkit.attention import Attention, Inputs
from tests.contract.cases import Case, each, plain, valid_mask
from tests.contract.stack import Stack, make, memory_for, tokens

LENGTHS = [5, 9, 1]
"""Of the segments of a batch, on both sides."""


def seen_by(stack: Stack, query: Tensor, memory: Tensor | None, valid: Tensor | None) -> list[Inputs]:
    """The inputs of every layer of the stack."""
    seen: list[Inputs] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, positional, named: seen.append(Inputs(*positional, **named)), with_kwargs=True
        )
        for layer in stack.layers
    ]
    stack(query, memory, query_valid=valid, memory_valid=valid if memory is not None else None)
    for hook in hooks:
        hook.remove()
    return seen


def layers(stack: Stack) -> list[Attention]:
    return [layer for layer in stack.layers if isinstance(layer, Attention)]


def learns(stack: Stack, query: Tensor, memory: Tensor | None) -> bool:
    """Whether a layer has such numbers."""
    seen = zip(layers(stack), seen_by(stack, query, memory, None), strict=True)
    return any(layer.learned_numbers(inputs) for layer, inputs in seen)


@each(slow=lambda case: not plain(case))
def test_rows_are_heads(case: Case) -> None:
    stack = make(case)
    query, memory = tokens(2, 9), memory_for(case, 2, 9)
    for layer, inputs in zip(layers(stack), seen_by(stack, query, memory, None), strict=True):
        attended = layer(**{**vars(inputs), "need_weights": True})
        softmaxes = layer.site.heads if attended.weights is None else attended.weights.shape[1]
        numbers, constant = layer.learned_numbers(inputs), layer.learned_numbers()
        assert set(constant) <= set(numbers)
        assert all(torch.equal(value.nan_to_num(), numbers[name].nan_to_num()) for name, value in constant.items())
        for name, value in numbers.items():
            assert value.dim() in (1, 2), name
            assert len(value) in (1, layer.site.heads, softmaxes), name
            assert not value.requires_grad, name
            rows = value.isfinite().flatten(1) if value.dim() == 2 else value.isfinite().unsqueeze(1)
            assert rows.any(), name
            assert (rows.all(1) | value.isnan().view(len(value), -1).all(1)).all(), (
                f"{name}: a row is NaN or none of it"
            )
            assert not name.endswith("by distance") or value.shape[1] % 2, name


@each(plain)
@torch.no_grad()
def test_saved_numbers_alone_decide_them(case: Case) -> None:
    """Another start with the same saved state gives the same numbers; another state gives others."""
    stack, query, memory = make(case), tokens(2, 9), memory_for(case, 2, 9)
    if not learns(stack, query, memory):
        return
    other = make(case)
    for tensor in stack.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(torch.rand_like(tensor) + 0.1)
        else:
            tensor.add_(torch.arange(1, tensor.numel() + 1).view_as(tensor) ** 2)
    before = [
        layer.learned_numbers(inputs)
        for layer, inputs in zip(layers(other), seen_by(other, query, memory, None), strict=True)
    ]
    other.load_state_dict(stack.state_dict())
    seen = seen_by(stack, query, memory, None)
    for layer, restored, inputs, old in zip(layers(stack), layers(other), seen, before, strict=True):
        numbers, again = layer.learned_numbers(inputs), restored.learned_numbers(inputs)
        assert set(numbers) == set(again) == set(old)
        for name, value in numbers.items():
            assert torch.equal(value.nan_to_num(), again[name].nan_to_num()), name
            if value.dim() == 1 or value.shape[1] > 1:  # the share of a single one is always 1
                assert not torch.equal(value.nan_to_num(), old[name].nan_to_num()), f"{name} is not learned"


@each(plain)
@torch.no_grad()
def test_padding_does_not_count(case: Case) -> None:
    """A ragged batch gives the mean over its tokens of what each segment gives alone, whatever padding holds."""
    stack, width = make(case), max(LENGTHS)
    query, memory = tokens(len(LENGTHS), width), memory_for(case, len(LENGTHS), width)
    valid = valid_mask(LENGTHS, width)
    for x in (query, memory):
        if x is not None:
            x[~valid] = 1e3
    if not learns(stack, query, memory):
        return
    together = seen_by(stack, query, memory, valid)
    totals: list[dict[str, Tensor]] = [{} for _ in together]
    for row, length in enumerate(LENGTHS):
        part = slice(row, row + 1), slice(length)
        alone = seen_by(stack, query[part], None if memory is None else memory[part], None)
        for layer, inputs, total in zip(layers(stack), alone, totals, strict=True):
            for name, value in layer.learned_numbers(replace(inputs, need_weights=False)).items():
                total[name] = total.get(name, torch.zeros_like(value)) + value * length / sum(LENGTHS)
    for layer, inputs, total in zip(layers(stack), together, totals, strict=True):
        for name, value in layer.learned_numbers(inputs).items():
            torch.testing.assert_close(
                value, total[name].type_as(value), rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
            )
