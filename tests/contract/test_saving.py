"""Promise 7: what is saved and restored gives the same outputs, and nothing but the arguments decides them."""

import copy

import torch
from safetensors.torch import load, save
from torch import Tensor

from tests.contract.cases import Case, each, plain
from tests.contract.stack import Stack, make, memory_for, tokens


def restored(case: Case, state: dict[str, Tensor]) -> Stack:
    """A new stack, made under other random numbers, with the state of an old one."""
    torch.manual_seed(2)
    stack = make(case)
    stack.load_state_dict(state)
    return stack


def check_copy(stack: Stack, query: Tensor, memory: Tensor | None, expected: Tensor) -> None:
    """Asks a copy to be independent."""
    other = copy.deepcopy(stack)
    for value in other.state_dict().values():
        value.zero_()
    assert torch.equal(stack(query, memory), expected), "the copy shares what it holds"
    assert not torch.equal(other(query, memory), expected)


@each(plain)
@torch.no_grad()
def test_a_stack_that_is_restored_or_adopts_one_like_it_gives_its_outputs(case: Case) -> None:
    """Fine-tuning begins with `adopt`, and no projection that was learned may go back to another's."""
    stack, query, memory = make(case), tokens(2, 9), memory_for(case, 2, 7)
    expected = stack(query, memory)
    other = restored(case, load(save(stack.state_dict())))
    assert torch.equal(other(query, memory), expected), "restored"
    torch.manual_seed(3)
    other = make(case)
    for one, its in zip(other.layers, stack.layers, strict=True):
        one.adopt(its.state_dict())
    assert torch.equal(other(query, memory), expected), "adopted"
    check_copy(stack, query, memory, expected)


@each(plain)
def test_random_numbers_serve_dropout_in_training_alone(case: Case) -> None:
    """Without dropout outputs neither depend on random numbers nor use them up."""
    stack, query, memory = make(case), tokens(2, 9), memory_for(case, 2, 7)
    for training in (False, True):
        stack.train(training)
        before = torch.get_rng_state()
        outputs = stack(query, memory)
        assert torch.equal(torch.get_rng_state(), before), "the global generator was used without dropout"
        if not training:
            torch.manual_seed(3)
            assert torch.equal(stack(query, memory), outputs)
    stack = make(case, dropout=0.5)
    assert torch.equal(stack(query, memory), stack(query, memory)), "dropout outside of training"
    stack.train()
    one, other = stack(query, memory), stack(query, memory)
    assert one.isfinite().all()
    assert not torch.equal(one, other), "no dropout in training"


@each(plain)
def test_after_update_keeps_a_trained_stack_usable(case: Case) -> None:
    stack, query, memory = make(case).train(), tokens(2, 9), memory_for(case, 2, 7)
    before = set(stack.state_dict())
    stack(query, memory).square().sum().backward()
    for layer in stack.layers:
        layer.after_update(1, 10)
    assert set(stack.state_dict()) == before
    for buffer in stack.buffers():
        assert not buffer.is_floating_point() or not buffer.isnan().any()
    assert stack.eval()(query, memory).isfinite().all()
