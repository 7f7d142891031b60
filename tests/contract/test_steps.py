"""Promise 3: `start` and T times `step` give what one `forward` over T gives, whatever beam search does between."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attended, Attention, Beginning, Inputs, Site, State, reorder
from tests.contract.cases import Case, each, small, steps, valid_mask
from tests.contract.stack import Stack, apart, make, memory_for, tokens

CLOSE = 1e-4
REORDERED = {
    "segments-permuted": torch.tensor([1, 2, 0]),
    "hypotheses-branch": torch.tensor([[2, 2, 0], [0, 1, 2], [1, 0, 1]]),
    "hypotheses-leave": torch.ones(3, 2, dtype=torch.long),
    "segments-leave": torch.tensor([2, 0]),
}
"""What beam search does between steps, to three segments of three hypotheses each; one after the other."""


def whole(
    stack: Stack, query: Tensor, memory: Tensor | None, memory_valid: Tensor | None, task: Tensor | None
) -> Tensor:
    """`forward` over the hypotheses (B, N, T, D), each with its segment's memory."""
    count = query.shape[1]
    if memory is not None:
        memory = memory.repeat_interleave(count, dim=0)
        memory_valid = None if memory_valid is None else memory_valid.repeat_interleave(count, dim=0)
    task = None if task is None else task.repeat_interleave(count, dim=0)
    return stack(query.flatten(0, 1), memory, memory_valid=memory_valid, task=task).unflatten(0, query.shape[:2])


def check_steps(
    stack: Stack,
    query: Tensor,
    memory: Tensor | None,
    memory_valid: Tensor | None = None,
    indices: Sequence[Tensor] = (),
    task: Tensor | None = None,
    more: int = 4,
) -> None:
    """Walks over query (B, N, T, D); then, for each index, reorders and walks on over `more` new tokens."""
    state = stack.start(len(query), memory, memory_valid, hypotheses=query.shape[1], task=task)
    output, state = stack.walk(query, state)
    assert apart(output, whole(stack, query, memory, memory_valid, task)) < CLOSE, "steps differ from forward"
    for index in indices:
        state = reorder(state, index)
        if index.dim() == 1:  # segments
            query, memory = query[index], None if memory is None else memory[index]
            memory_valid = None if memory_valid is None else memory_valid[index]
            task = None if task is None else task[index]
        else:
            query = query.take_along_dim(index[:, :, None, None], dim=1)
        query = torch.cat([query, tokens(*query.shape[:2], more)], dim=2)
        output, state = stack.walk(query[:, :, -more:], state)
        expected = whole(stack, query, memory, memory_valid, task)[:, :, -more:]
        assert apart(output, expected) < CLOSE, f"steps differ after reorder by {index.tolist()}"


def length(case: Case) -> int:
    """One that crosses every block of its options twice."""
    return 2 * max(case.blocks, default=6) + 4


def check_layout(case: Case, stack: Stack) -> None:
    """Asks for states with segments first and hypotheses second, and a source that all of a segment share."""
    state = stack.start(2, memory_for(case, 2, 9), hypotheses=3)
    for _ in range(3):
        for shared, value in tensors(state):
            assert value.shape[:1] == (2,) if shared else value.shape[:2] == (2, 3), tuple(value.shape)
        _, state = stack.step(tokens(2, 3), state)
    if case.role == "cross":  # the source, projected, is held once a segment
        one = sum(value.numel() for shared, value in tensors(stack.start(2, memory_for(case, 2, 9))) if shared)
        assert one == sum(value.numel() for shared, value in tensors(state) if shared)


@each(steps)
@torch.no_grad()
def test_steps_give_what_forward_gives(case: Case) -> None:
    """With one hypothesis, and with four as beam search begins."""
    stack, index = make(case), torch.zeros(2, 4, dtype=torch.long)
    check_layout(case, stack)
    check_steps(stack, tokens(2, 1, max(length(case), 40)), memory_for(case, 2, 9), indices=[index])


@each(lambda case: small(case) and steps(case))
@torch.no_grad()
def test_hypotheses_of_ragged_segments_step_each_for_itself_and_go_on_after_reorder(case: Case) -> None:
    memory_valid = valid_mask([9, 1, 6], 9) if case.role == "cross" else None
    query = tokens(3, 3, length(case) // 2)
    check_steps(make(case), query, memory_for(case, 3, 9), memory_valid, list(REORDERED.values()))


@pytest.mark.slow
@each(lambda case: small(case) and steps(case))
@pytest.mark.parametrize("index", REORDERED.values(), ids=REORDERED)
@torch.no_grad()
def test_steps_go_on_for_long_after_reorder(case: Case, index: Tensor) -> None:
    memory_valid = valid_mask([9, 4, 6], 9) if case.role == "cross" else None
    half, memory = length(case) // 2, memory_for(case, 3, 9)
    check_steps(make(case), tokens(3, 3, half), memory, memory_valid, [index], more=length(case) - half)


def tensors(state: Any, shared: bool = False) -> Iterator[tuple[bool, Tensor]]:
    """Every tensor of a state, and whether all hypotheses of a segment share it; nothing but plain numbers besides."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, shared or key == "shared")
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors(value, shared)
    elif isinstance(state, Tensor):
        yield shared, state
    else:
        assert state is None or isinstance(state, bool | int | float), f"{type(state)} in a state"


def test_the_check_catches_a_state_that_ignores_reorder() -> None:
    class Total(Attention):
        """A running sum; its state lies where `reorder` takes it for the segment's."""

        def attend(self, inputs: Inputs) -> Attended:
            return Attended(inputs.query.cumsum(dim=1))

        def begin(self, inputs: Beginning) -> tuple[State, None]:
            return {"shared": {"total": torch.zeros(inputs.batch_size, inputs.hypotheses, 32)}}, None

        def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
            total = state["shared"]["total"] + inputs.query
            return Attended(total), {"shared": {"total": total}}

    stack = Stack([Total(Site("decoder", 32, 4))])
    check_steps(stack, tokens(3, 3, 6), None)
    with pytest.raises(AssertionError, match="after reorder"):
        check_steps(stack, tokens(3, 3, 6), None, indices=[torch.tensor([[2, 2, 0]] * 3)])
