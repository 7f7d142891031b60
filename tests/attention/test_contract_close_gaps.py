"""Segments that leave a batch are written over in place; the state is then what `reorder` makes of it."""

import copy

import pytest
import torch
from torch import Tensor

from mtkit.attention import State, mechanisms, reorder
from mtkit.attention.contract import close_gaps
from mtkit.decoding.search.continuations import still_running
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import load_recipe

PLACES = [(name, role) for name, each in mechanisms().items() for role in ("decoder", "cross") if role in each.roles]
SMALL = {"d_model": 16, "heads": 2, "feed_forward": 24, "max_length": 32, "encoder_layers": 1, "decoder_layers": 2}


def walked(net: Network, state: State, target: Tensor, first: int, last: int) -> tuple[list[Tensor], State]:
    """The logits of each step with target (B, N, T), and the state behind them."""
    found = []
    for position in range(first, last):
        torch.manual_seed(position)
        logits, state, _ = net.step(target[..., position], state)
        found.append(logits.whole())
    return found, state


@torch.no_grad()
@pytest.mark.parametrize(("name", "role"), [*PLACES, ("full", "encoder"), ("rnn", "")])
def test_a_state_is_what_reorder_makes_of_it(name: str, role: str) -> None:
    other = {"model": {"architecture": "rnn"}} if name == "rnn" else {"model": SMALL, "attention": {role: name}}
    net = build_model(load_recipe(None, other), source_vocabulary=24, target_vocabulary=24).eval()
    source, target = torch.randint(4, 24, (7, 9)), torch.randint(4, 24, (7, 2, 12))
    valid = torch.arange(9) < torch.tensor([9, 4, 2, 7, 9, 1, 8])[:, None]
    _, state = walked(net, net.start(net.encode(source, valid), hypotheses=2), target, 0, 5)
    for index, until in (([0, 5, 2, 6, 4], 8), ([0, 4, 2], 10), ([0], 12)):  # gaps, one gap and an end, an end
        kept = torch.tensor(index)
        expected, other_state = reorder(copy.deepcopy(state), kept), close_gaps(state, kept)
        target = target[kept]
        first = until - 2
        one, _ = walked(net, expected, target, first, until)
        two, state = walked(net, other_state, target, first, until)
        for ours, theirs in zip(two, one, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-5)  # products of parts may be summed otherwise


def test_segments_that_are_one_in_memory_come_apart() -> None:
    state = {"x": torch.tensor([[3.0]]).expand(4, 5), "y": torch.arange(4)}
    after = close_gaps(state, torch.tensor([0, 3]))
    assert after["x"].tolist() == [[3.0] * 5] * 2
    assert after["y"].tolist() == [0, 3]


@pytest.mark.parametrize(
    ("done", "kept"),
    [
        ("0000", None),
        ("0100", [0, 3, 2]),
        ("1001", [2, 1]),
        ("0011", [0, 1]),
        ("1111", []),
        ("0000000001", None),  # too few to pay
        ("1000000001", [8, 1, 2, 3, 4, 5, 6, 7]),
        ("0" * 90 + "1" * 7, None),
        ("0" * 90 + "1" * 8, list(range(90))),
        ("1" * 8 + "0" * 90, [*range(90, 98), *range(8, 90)]),
    ],
)
def test_those_who_stay_fill_the_gaps(done: str, kept: list[int] | None) -> None:
    found = still_running(torch.tensor([each == "1" for each in done]), 0)
    assert (found if found is None else found.tolist()) == kept
