"""A mechanism conditioned on a task takes one for each segment; every other mechanism reads none."""

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attended, Attention, Beginning, Inputs, Site, State
from mtkit.errors import MtkitError
from tests.contract.cases import Case, each, plain, small, steps, valid_mask
from tests.contract.stack import Stack, apart, make, memory_for, tokens
from tests.contract.test_naive import CLOSE as EXACT
from tests.contract.test_steps import REORDERED, check_steps

CLOSE = 1e-5
TASKS = torch.tensor([1, 0, 1])


def conditioned(case: Case) -> bool:
    """Small options of a mechanism that reads tasks."""
    return small(case) and "tasks" in case.mechanism.options


def check_tasks(stack: Stack, query: Tensor, memory: Tensor | None, lengths: list[int]) -> None:
    """Gives query (B, T, D) a task for each segment, and asks for what each segment gives alone with its own."""
    valid = valid_mask(lengths, query.shape[1])
    together = stack(query, memory, query_valid=valid, task=TASKS)
    for row, (task, length) in enumerate(zip(TASKS, lengths, strict=True)):
        one, source = query[row : row + 1, :length], None if memory is None else memory[row : row + 1]
        alone, other = stack(one, source, task=task.view(1)), stack(one, source, task=1 - task.view(1))
        assert apart(together[row : row + 1, :length], alone) < CLOSE, "a segment has another's task"
        assert apart(other, alone) > 1e-3, "the task changes nothing"


@each(plain)
@torch.no_grad()
def test_without_a_task_all_have_the_first(case: Case) -> None:
    stack, query, memory = make(case), tokens(3, 7), memory_for(case, 3, 5)
    expected = stack(query, memory)
    assert apart(stack(query, memory, task=torch.zeros(3, dtype=torch.long)), expected) < CLOSE
    if "tasks" not in case.mechanism.options:
        assert apart(stack(query, memory, task=TASKS), expected) < CLOSE, "a task is read that no option declares"


@each(conditioned)
@torch.no_grad()
def test_a_batch_may_mix_tasks(case: Case) -> None:
    check_tasks(make(case), tokens(3, 23), memory_for(case, 3, 9), [23, 12, 5])


@each(lambda case: conditioned(case) and hasattr(case.mechanism.kind, "naive"))
def test_forward_is_the_equation_with_tasks_mixed(case: Case) -> None:
    stack, query = make(case).double(), tokens(3, 23, dtype=torch.float64)
    memory = memory_for(case, 3, 9, dtype=torch.float64)
    fast, literal = (stack(query, memory, task=TASKS, form=form) for form in ("forward", "naive"))
    assert apart(fast, literal) < EXACT
    weight = torch.randn_like(fast)
    pair = [torch.autograd.grad((form * weight).sum(), list(stack.parameters())) for form in (fast, literal)]
    assert all(apart(*gradients) < EXACT for gradients in zip(*pair, strict=True))


@each(lambda case: conditioned(case) and steps(case))
@torch.no_grad()
def test_steps_keep_the_task_of_each_segment(case: Case) -> None:
    check_steps(make(case), tokens(3, 3, 12), memory_for(case, 3, 9), indices=list(REORDERED.values()), task=TASKS)


@each(conditioned)
@pytest.mark.parametrize("task", [-1, 1000])
def test_a_task_that_there_is_not_is_refused(case: Case, task: int) -> None:
    stack, query, memory, wrong = make(case), tokens(2, 5), memory_for(case, 2, 5), torch.tensor([0, task])
    with pytest.raises(MtkitError, match=f"no task {task}") as refusal:
        stack(query, memory, task=wrong)
    assert "\n" not in str(refusal.value)
    if steps(case):
        with pytest.raises(MtkitError, match=f"no task {task}"):
            stack.start(2, memory, task=wrong)


class Scaled(Attention):
    """Tokens times 1 + their task; wrong in the way that `fault` says, which the checks must catch."""

    def __init__(self, fault: str) -> None:
        super().__init__(Site("decoder", 32, 4))
        self.fault = fault

    def attend(self, inputs: Inputs) -> Attended:
        query, task = inputs.query, inputs.task
        assert task is not None
        if self.fault == "mixed":
            task = task[:1].expand_as(task)
        return Attended(query if self.fault == "unread" else query * (1 + task[:, None, None]))

    def begin(self, inputs: Beginning) -> tuple[State, None]:
        assert inputs.task is not None
        return {"shared": {"task": inputs.task}} if self.fault != "kept" else {"task": inputs.task.tolist()}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        query = inputs.query
        task = torch.as_tensor(state["task"]) if self.fault == "kept" else state["shared"]["task"]
        return Attended(query * (1 + task[: len(query), None, None])), state


@pytest.mark.parametrize(("fault", "message"), [("mixed", "another's task"), ("unread", "changes nothing")])
def test_the_check_catches_a_task_that_is_not_the_segments(fault: str, message: str) -> None:
    check_tasks(Stack([Scaled("")]), tokens(3, 6), None, [6, 3, 2])
    with pytest.raises(AssertionError, match=message):
        check_tasks(Stack([Scaled(fault)]), tokens(3, 6), None, [6, 3, 2])


def test_the_check_catches_a_task_that_reorder_leaves_behind() -> None:
    indices = [torch.tensor([1, 2])]
    check_steps(Stack([Scaled("")]), tokens(3, 3, 6), None, indices=indices, task=TASKS)
    with pytest.raises(AssertionError, match="after reorder"):
        check_steps(Stack([Scaled("kept")]), tokens(3, 3, 6), None, indices=indices, task=TASKS)
