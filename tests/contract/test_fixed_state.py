"""States of fixed shapes: the same steps, and nothing in them grows or depends on a number of the host."""

import pytest
import torch
from torch import Tensor

from mtkit.attention.contract import close_gaps, reorder
from mtkit.decoding.step_graphs import tensors_of
from tests.contract.cases import Case, all_cases, plain, steps
from tests.contract.stack import make, memory_for, tokens

CASES = [case for case in all_cases() if steps(case) and (plain(case) or case.name == "full") and not case.slow]


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_steps_with_a_fixed_state_are_the_same(case: Case) -> None:
    attention = make(case).layers[0].eval()
    memory, query = memory_for(case, 3, 9), tokens(3, 2, 14)
    valid = None if memory is None else torch.arange(9) < torch.tensor([[9], [4], [7]])

    def walk(*, fixed: bool) -> list[Tensor] | None:
        state, _ = attention.start(3, memory, None if valid is None else valid.clone(), hypotheses=2)
        outputs, kept = [], [0, 1, 2]
        shapes: list[torch.Size] = []
        for number in range(14):
            if fixed and number in (2, 9):
                state = attention.fixed_state(state, 2, 7)
                if state is None:
                    return None
                shapes = [x.shape for x in tensors_of(state)]
            attended, state = attention.step(query[kept, :, number], state)
            outputs.append(attended.output)
            if fixed and number >= 2:
                assert [x.shape for x in tensors_of(state)] == shapes
            if number in (4, 10):
                state = reorder(state, torch.tensor([[1, 0], [0, 0], [1, 1]])[kept])
            if number == 8:
                kept = [0, 2]
                state = close_gaps(state, torch.tensor(kept))
        return outputs

    found, wanted = walk(fixed=True), walk(fixed=False)
    if found is not None and wanted is not None:
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
