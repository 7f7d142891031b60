"""Promise 2: in the decoder, and across target positions in the cross role, later tokens change nothing earlier."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attended, Attention, Inputs, Site
from tests.contract.cases import Case, each, small, steps
from tests.contract.stack import Stack, apart, make, memory_for, tokens

CLOSE = 1e-5


def cuts(case: Case) -> list[int]:
    """Positions from which tokens change: the second, and around blocks."""
    around = [block + shift for block in case.blocks for shift in (0, 1)]
    return sorted({1, 2, *around, 33, 100}) if case.small else sorted({2, *around, case.long - 1})


def check_causal(
    stack: Stack, query: Tensor, memory: Tensor | None, positions: list[int], others: Iterable[int] = ()
) -> None:
    """Changes the query (B, T, D) from each position on, by much; rows before must not notice, and rows after must.

    Where the stack does not read queries, no row may notice. At `positions` the prefix alone is compared as well.
    """
    whole = stack(query, memory)
    cuts = [*positions, *others]
    changed = query.repeat(len(cuts), 1, 1, 1)  # (cuts, B, T, D), in one batch: a forward for each takes long
    for row, cut in zip(changed, cuts, strict=True):
        row[:, cut:] += 10 * torch.randn_like(row[:, cut:])
    outputs = stack(changed.flatten(0, 1), None if memory is None else memory.repeat(len(cuts), 1, 1))
    for output, cut in zip(outputs.view_as(changed), cuts, strict=True):
        assert apart(output[:, :cut], whole[:, :cut]) < CLOSE, f"a row before {cut} saw a token from there on"
        changes = apart(output[:, cut:], whole[:, cut:])
        if reads_queries(stack):
            assert changes > 1e-3, f"no row from {cut} on saw that its token changed"
        else:
            assert changes < CLOSE, f"a row from {cut} on read its query"
    for cut in positions:
        prefix = stack(query[:, :cut], memory)
        assert apart(prefix, whole[:, :cut]) < CLOSE, f"a prefix of {cut} gives something else alone"


def reads_queries(stack: Stack) -> bool:
    """Whether the output, which is the last layer's, depends on what the query holds."""
    return bool(stack.layers[-1].reads_query)


@each(steps)
@torch.no_grad()
def test_later_tokens_change_nothing_earlier(case: Case) -> None:
    others = range(5, case.long, 13) if case.small else ()
    # float64: several softmaxes one after the other make more of float32's rounding than `CLOSE`
    query, memory = tokens(1, case.long, dtype=torch.float64), memory_for(case, 1, 9, dtype=torch.float64)
    check_causal(make(case).double(), query, memory, cuts(case), others)


@each(lambda case: small(case) and steps(case))
def test_in_training_no_earlier_row_sees_a_later_token_nor_sends_it_a_gradient(case: Case) -> None:
    stack = make(case).train()
    with torch.no_grad():
        check_causal(stack, tokens(2, 13), memory_for(case, 2, 9), [1, 5])
    query = tokens(1, 13).requires_grad_()
    output = stack(query, memory_for(case, 1, 9))
    (gradient,) = torch.autograd.grad(output[:, :6].square().sum(), query, materialize_grads=True)
    assert gradient[:, 6:].abs().max() == 0
    assert (gradient[:, :6].abs().max() > 0) == reads_queries(stack)


class Shifted(Attention):
    """A decoder that leaks in the way that `ahead` says; the check must catch each."""

    def __init__(self, site: Site, ahead: str) -> None:
        super().__init__(site)
        self.ahead = ahead

    def attend(self, inputs: Inputs) -> Attended:
        query = inputs.query
        if self.ahead == "value":
            return Attended(query.roll(-1, dims=1))
        if self.ahead == "selection":  # whether a row is kept depends on its rank among all
            norm = query.norm(dim=-1, keepdim=True)
            return Attended(query * (norm >= norm.median(dim=1, keepdim=True).values))
        return Attended(query / query.abs().amax(dim=(1, 2), keepdim=True))  # a statistic of all positions


@pytest.mark.parametrize("ahead", ["value", "selection", "statistic"])
def test_the_check_catches_every_kind_of_leak(ahead: str) -> None:
    with pytest.raises(AssertionError, match="saw a token"):
        check_causal(Stack([Shifted(Site("decoder", 32, 4), ahead)]), tokens(2, 13), None, [5])


def test_the_check_catches_a_query_read_against_the_word() -> None:
    class Denied(Attention):
        reads_query = False

        def attend(self, inputs: Inputs) -> Attended:
            return Attended(inputs.query)

    with pytest.raises(AssertionError, match="read its query"):
        check_causal(Stack([Denied(Site("cross", 32, 4))]), tokens(2, 13), None, [5])
