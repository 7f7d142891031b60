"""Draws and choices that a second computation repeats: dropout, and choices of nested passes and checkpoints."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtkit.attention.kernels.reproducible import (
    random_key,
    record_choices,
    replay_choice,
    replay_choices,
    seeded_dropout,
    with_recorded_choices,
)


def test_a_key_reads_the_low_bits_of_any_number() -> None:
    assert random_key(2**63, 1, 2) == random_key(0, 1, 2)
    assert random_key(2**64 - 1) == random_key(-1) == random_key(2**32 - 1)
    assert random_key(1, 0, 3) == 3194257692


def test_noise_is_the_same_for_the_same_seed_and_keeps_the_mean() -> None:
    x = torch.ones(1000)
    first, again = (seeded_dropout(0.25, 7, x.device) for _ in range(2))
    one = first(x)
    assert torch.equal(one, again(x))
    assert not torch.equal(one, first(x))
    assert set(one.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert seeded_dropout(0.0, 7, x.device)(x) is x


def drawn(below: int = 5) -> Tensor:
    """A choice that never falls out alike twice."""
    return replay_choice(torch.randint(below, (1000,)), below)


def test_the_second_pass_repeats_the_first_choice_by_choice() -> None:
    with record_choices() as kept:
        first = drawn(), drawn(300), replay_choice(torch.rand(9) > 0.5, 2)
    with replay_choices(kept):
        second = drawn(), drawn(300), replay_choice(torch.rand(9) > 0.5, 2)
    for one, other in zip(first, second, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_nothing_is_kept_or_repeated_elsewhere() -> None:
    with record_choices() as kept:
        pass
    drawn()
    assert not kept
    with replay_choices([]):
        pass
    choice = torch.arange(3)
    assert replay_choice(choice, 3) is choice


def test_passes_end_where_they_fail() -> None:
    for one in (record_choices(), replay_choices([torch.zeros(1000)])):
        with pytest.raises(KeyError), one:
            raise KeyError
    assert drawn().any()


@pytest.mark.parametrize(
    ("below", "dtype"),
    [(2, torch.uint8), (256, torch.uint8), (257, torch.int16), (2**15, torch.int16), (2**15 + 1, torch.int32)],
)
def test_choices_are_kept_in_the_smallest_integers(below: int, dtype: torch.dtype) -> None:
    largest = torch.tensor([0, below - 1])
    with record_choices() as kept:
        replay_choice(largest, below)
    assert kept[0].dtype == dtype
    with replay_choices(kept):
        assert torch.equal(replay_choice(largest - largest, below), largest)


def test_what_is_run_again_inside_a_second_pass_repeats_the_first() -> None:
    """A checkpoint inside a reversible sub-layer: run first without gradients, then with the checkpoint."""
    with record_choices() as outer:
        first = drawn()
    with replay_choices(outer):
        with record_choices() as inner:
            second = drawn()
        with replay_choices(inner):
            third = drawn()
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_makes_its_choices_once(reentrant: bool) -> None:
    """Two in flight, and backward twice through the same graph."""
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    def chosen(x: Tensor, number: int) -> Tensor:
        seen[number].append(drawn())
        return x.sin() * seen[number][-1]

    x = torch.randn(1000, requires_grad=True)
    outputs = [
        checkpoint(with_recorded_choices(chosen), x, number, use_reentrant=reentrant, preserve_rng_state=False)
        for number in range(2)
    ]
    for number, output in enumerate(outputs):
        if not reentrant:
            output.sum().backward(retain_graph=True)
        output.sum().backward()
        first, *again = seen[number]
        assert len(again) == (1 if reentrant else 2)
        assert all(torch.equal(first, each) for each in again)
    assert not torch.equal(seen[0][0], seen[1][0])
