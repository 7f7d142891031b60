"""States of fixed shapes: the same steps, while nothing in them grows or depends on a number that the host reads."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtkit.attention.states import close_gaps, reorder, tensors_of
from tests.contract.cases import Case, all_cases, plain, steps, valid_mask
from tests.contract.stack import make, memory_for, tokens

CASES = [case for case in all_cases() if steps(case) and (plain(case) or case.name == "full") and not case.slow]
HYPOTHESES, STEPS = 2, 14


class NoReads(TorchDispatchMode):
    """Fails if a value of a tensor is read."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_steps_with_a_fixed_state_are_the_same(case: Case) -> None:
    attention = make(case).eval()
    memory, query = memory_for(case, 3, 9), tokens(3, HYPOTHESES, STEPS)
    shapes: list[torch.Size] = []
    task = torch.tensor([0, 1, 0]) if case.small else None

    def walk(fixed: Callable[[Any, int], Any]) -> list[Tensor] | None:
        valid = None if memory is None else valid_mask([9, 4, 7], 9)
        state, outputs, kept = attention.start(3, memory, valid, HYPOTHESES, task), [], [0, 1, 2]
        for number in range(STEPS):
            state = fixed(state, number)
            if state is None:
                return None
            with NoReads() if shapes else nullcontext():
                output, state = attention.step(query[kept, :, number], state)
            outputs.append(output)
            if number in (4, 10):
                state = reorder(state, torch.tensor([[1, 0], [0, 0], [1, 1]])[kept])
            if number == 8:
                kept = [0, 2]
                state = close_gaps(state, torch.tensor(kept))
        return outputs

    def as_fixed(state: Any, number: int) -> Any:
        if number in (2, 9):
            layers = zip(attention.layers, state["layers"], strict=True)
            states = [layer.fixed_state(before, HYPOTHESES, 7) for layer, before in layers]
            shapes[:] = [x.shape for x in tensors_of(states)]
            return None if None in states else {"layers": states}
        assert number < 2 or [x.shape for x in tensors_of(state)] == shapes
        return state

    found = walk(as_fixed)
    if found is not None:
        shapes.clear()
        wanted = walk(lambda state, number: state)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
