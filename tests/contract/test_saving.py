"""Promise 7: what is saved and restored gives the same outputs, and nothing but the arguments decides them."""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.contract.cases import Case, each, plain
from tests.contract.stack import Stack, make, memory_for, tokens


def restored(case: Case, state: dict[str, Tensor]) -> Stack:
    """A new stack, made under other random numbers, with the state of an old one."""
    torch.manual_seed(2)
    stack = make(case)
    stack.load_state_dict(state)
    return stack


@each(plain)
@torch.no_grad()
def test_a_restored_stack_gives_the_same_outputs(case: Case, tmp_path: Path) -> None:
    stack, query, memory = make(case), tokens(2, 9), memory_for(case, 2, 7)
    expected = stack(query, memory)
    save_file(stack.state_dict(), tmp_path / "model.safetensors")
    other = restored(case, load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(query, memory), expected)


@each(plain)
@torch.no_grad()
def test_a_stack_that_adopts_one_like_it_gives_its_outputs(case: Case) -> None:
    """Fine-tuning begins so, and no projection that was learned may go back to another's."""
    stack, query, memory = make(case), tokens(2, 9), memory_for(case, 2, 7)
    torch.manual_seed(2)
    other = make(case)
    for one, its in zip(other.layers, stack.layers, strict=True):
        one.adopt(its.state_dict())
    assert torch.equal(other(query, memory), stack(query, memory))


@each(plain)
@torch.no_grad()
def test_a_copy_is_independent(case: Case) -> None:
    stack, query, memory = make(case), tokens(2, 9), memory_for(case, 2, 7)
    expected = stack(query, memory)
    other = copy.deepcopy(stack)
    for value in other.state_dict().values():
        value.zero_()
    assert torch.equal(stack(query, memory), expected)
    assert not torch.equal(other(query, memory), expected)


@each(plain)
def test_outputs_do_not_depend_on_random_numbers_nor_use_them_up(case: Case) -> None:
    stack, query, memory = make(case), tokens(2, 9), memory_for(case, 2, 7)
    for training in (False, True):
        stack.train(training)
        before = torch.get_rng_state()
        outputs = stack(query, memory)
        assert torch.equal(torch.get_rng_state(), before), "the global generator was used without dropout"
        if not training:
            torch.manual_seed(3)
            assert torch.equal(stack(query, memory), outputs)


@each(plain)
def test_dropout_acts_in_training_only(case: Case) -> None:
    stack, query, memory = make(case, dropout=0.5), tokens(2, 9), memory_for(case, 2, 7)
    assert torch.equal(stack(query, memory), stack(query, memory))
    stack.train()
    one, other = stack(query, memory), stack(query, memory)
    assert one.isfinite().all()
    assert not torch.equal(one, other)


@each(plain)
def test_after_update_keeps_a_trained_stack_usable(case: Case) -> None:
    stack, query, memory = make(case).train(), tokens(2, 9), memory_for(case, 2, 7)
    before = set(stack.state_dict())
    stack(query, memory).square().sum().backward()
    for layer in stack.layers:
        layer.after_update(1, 10)
    assert set(stack.state_dict()) == before
    assert stack.eval()(query, memory).isfinite().all()
