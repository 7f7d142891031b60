"""No segments, no tokens, no memory: empty outputs, and zero before `out_proj` where there is nothing to attend to."""

import pytest
import torch
from torch import Tensor

from mtkit.attention import reorder
from mtkit.errors import MtkitError
from tests.contract.cases import Case, each, once, plain, small, steps
from tests.contract.stack import Stack, apart, heads_of_zero, make, memory_for, tokens

CLOSE = 1e-5
SEGMENTS, QUERIES, KEYS = 2, 5, 6


def masks(query: Tensor, memory: Tensor | None) -> dict[str, Tensor]:
    """Every token is real."""
    given = {"query_valid": query, "memory_valid": memory}
    return {name: torch.ones(x.shape[:2], dtype=torch.bool) for name, x in given.items() if x is not None}


def nothing(stack: Stack, query: Tensor, memory: Tensor) -> Tensor:
    """What the last layer makes of heads that are zero."""
    with heads_of_zero(stack.layers[-1]):
        return stack(query, memory)


@each(once)
def test_without_segments_or_tokens_outputs_are_empty(case: Case) -> None:
    """In training, which has losses and samples."""
    stack = make(case).train()
    for segments, length in ((0, QUERIES), (SEGMENTS, 0)):
        query, memory = tokens(segments, length).requires_grad_(), memory_for(case, segments, KEYS)
        task = torch.zeros(segments, dtype=torch.long)
        ways = [{}, masks(query, memory)]
        for given in ways if plain(case) else [ways[segments > 0]]:  # with masks where there are no tokens
            output, _, sampled = stack.attend(query, memory, task=task, **given)
            assert output.shape == (segments, length, 32)
            assert all(each.shape == (segments,) for each in sampled)
            output.sum().backward()
        first = stack.layers[0](query, memory, need_weights=case.mechanism.weights)
        assert all(loss.detach() == 0 for loss in first.losses.values())
        if case.mechanism.weights:
            keys = length if memory is None else KEYS
            assert (first.weights.shape[0], *first.weights.shape[2:]) == (segments, length, keys)
    gradients = [parameter.grad for parameter in stack.parameters()]
    assert all(gradient is None or not gradient.any() for gradient in gradients)


@each(lambda case: case.role == "cross")
def test_without_a_memory_the_result_is_zero_before_out_proj(case: Case) -> None:
    stack, query, memory = make(case), tokens(SEGMENTS, QUERIES), memory_for(case, SEGMENTS, 0)
    for given in ({}, masks(query, memory)):
        output = stack(query, memory, **given)
        assert apart(output, nothing(stack, query, memory)) < CLOSE
    with torch.no_grad():
        steps = tokens(SEGMENTS, 3, QUERIES)
        output, _ = stack.walk(steps, stack.start(SEGMENTS, memory, hypotheses=3))
        expected = nothing(stack, steps.flatten(0, 1), memory.repeat_interleave(3, 0))
    assert apart(output, expected.view_as(output)) < CLOSE


@each(lambda case: small(case) and once(case) and steps(case))
@torch.no_grad()
def test_steps_go_on_without_segments(case: Case) -> None:
    """Before and after the first token, across the borders of blocks."""
    stack = make(case)
    for before in (0, 2):
        state = stack.start(SEGMENTS, memory_for(case, SEGMENTS, KEYS), hypotheses=3)
        for _ in range(before):
            _, state = stack.step(tokens(SEGMENTS, 3), state)
        state = reorder(state, torch.zeros(0, dtype=torch.long))
        output, _ = stack.walk(tokens(0, 3, 2 * QUERIES), state)
        assert output.shape == (0, 3, 2 * QUERIES, 32)


@each(lambda case: small(case) and plain(case) and steps(case))
def test_decoding_starts_with_a_segment_and_a_hypothesis(case: Case) -> None:
    stack = make(case)
    with pytest.raises(MtkitError, match=r"^batch_size = 0 must be at least 1 to start decoding$"):
        stack.start(0, memory_for(case, 0, KEYS))
    with pytest.raises(MtkitError, match=r"^hypotheses = 0 must be at least 1 to start decoding$"):
        stack.start(SEGMENTS, memory_for(case, SEGMENTS, KEYS), hypotheses=0)
