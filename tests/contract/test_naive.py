"""Promise 8: where `forward` is not the equation written literally, `naive` is, and both give the same."""

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attended, Attention, Inputs, Site
from mtkit.attention.bases import pattern_attention
from mtkit.attention.bases.pattern_attention import PatternAttention
from mtkit.attention.slots import SLOTS
from tests.contract.cases import Case, each, valid_mask
from tests.contract.stack import Stack, apart, make, memory_for, tokens

CLOSE = 1e-10
ENOUGH = 67
"""Positions: the engines' blocks of 32 have one with neighbours on both sides; equations take their square in time."""
FEWER = 43
"""Positions where slots are filled, which act on each score, head or token alike, and where a variant stands for its
options in one role more: two of the blocks."""


def check_naive(stack: Stack, query: Tensor, memory: Tensor | None, lengths: list[int]) -> None:
    """Compares outputs at real positions, and the gradients of all inputs and parameters, in float64."""
    masks = {"query_valid": valid_mask(lengths, query.shape[1])}
    inputs = [query.requires_grad_()]
    if memory is not None:
        masks["memory_valid"] = valid_mask(lengths[::-1], memory.shape[1])
        inputs.append(memory.requires_grad_())
    real = masks["query_valid"]
    outputs = [stack(query, memory, form=form, **masks)[real] for form in ("forward", "naive")]
    assert apart(*outputs) < CLOSE, "outputs differ"
    weight = torch.randn_like(outputs[0])
    inputs += list(stack.parameters())
    fast, literal = (
        torch.autograd.grad((output * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
        for output in outputs
    )
    for one, other in zip(fast, literal, strict=True):
        assert apart(one, other) < CLOSE, "gradients differ"


def literal(case: Case) -> bool:
    """A mechanism with a naive form."""
    return hasattr(case.mechanism.kind, "naive")


@each(literal)
def test_forward_is_the_equation(case: Case) -> None:
    enough = FEWER if case.repeats or any(slot in case.options for slot in SLOTS) else ENOUGH
    width = enough if case.small else case.long // 2
    lengths = [width, 1, width // 2] if case.small else [width, width // 2]
    memory = memory_for(case, len(lengths), width, dtype=torch.float64)
    check_naive(make(case).double(), tokens(len(lengths), width, dtype=torch.float64), memory, lengths)


@each(lambda case: issubclass(case.mechanism.kind, PatternAttention) and case.setting in ("small", "default"))
def test_a_short_segment_is_the_equation(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In short segments, one product of all heads is masked by the patterns."""
    monkeypatch.setattr(pattern_attention, "SHORT", FEWER)
    lengths = [FEWER, 0, 1, FEWER // 2]
    memory = memory_for(case, len(lengths), FEWER, dtype=torch.float64)
    check_naive(make(case).double(), tokens(len(lengths), FEWER, dtype=torch.float64), memory, lengths)


@pytest.mark.slow
@each(lambda case: literal(case) and case.small)
def test_forward_is_the_equation_over_more_blocks(case: Case) -> None:
    width = case.long
    lengths = [width, 1, 2, width // 2, width - 1]
    memory = memory_for(case, len(lengths), width, dtype=torch.float64)
    check_naive(make(case).double(), tokens(len(lengths), width, dtype=torch.float64), memory, lengths)


@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_the_check_catches_a_difference(wrong: str) -> None:
    class Almost(Attention):
        def naive(self, query: Tensor, *_: object, **__: object) -> Attended:
            return Attended(query * 2)

        def attend(self, inputs: Inputs) -> Attended:
            query = inputs.query
            return Attended(query * 2.000001 if wrong == "output" else query + query.detach())

    with pytest.raises(AssertionError, match=wrong):
        check_naive(Stack([Almost(Site("encoder", 32, 4))]), tokens(2, 6, dtype=torch.float64), None, [6, 3])
