"""Promise 5: time and memory grow with the length as `growth` says, and below 2 nothing of T x S is ever held."""

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import _lru_cache_wrapper
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attended, Attention, Inputs, Site, mechanisms
from mtkit.attention.bases import feature_attention
from mtkit.attention.registry import Mechanism
from tests.contract.cases import Case, each, steps
from tests.contract.counting import Count, count, exponent
from tests.contract.stack import Stack, make, memory_for, tokens

MARGIN = 0.1


@pytest.fixture(autouse=True)
def _long_from_256_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are made again in the backward pass beyond a length; both lengths compared here are to be beyond it."""
    monkeypatch.setattr(feature_attention, "PART", 256)


def work(stack: Stack, query: Tensor, memory: Tensor | None) -> tuple[Count, int]:
    """The cost of forward and backward, with all that depends on the length alone made anew."""
    forget()
    stack.train()
    for layer in stack.layers:
        if getattr(layer, "regularizes_weights", False):
            layer.eval()  # a loss on attention weights reads T x S of them in training, whatever the mechanism costs
    return count(lambda: stack(query, memory).square().sum().backward())


def forget() -> None:
    """Empties what mechanisms keep for lengths they have seen, so that no length is cheaper for an earlier test."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mtkit.attention.") and name != "mtkit.attention.registry":
            for each in vars(module).values():
                if isinstance(each, _lru_cache_wrapper):
                    each.cache_clear()


def log_factor(mechanism: Mechanism, length: int, longer: int) -> float:
    """By how much a factor of log T grows from one length to another; 1 for a mechanism that declares no such factor.

    `growth` is of powers of T alone; a logarithm stands in `complexity`.
    """
    return math.log(longer) / math.log(length) if "log" in mechanism.complexity else 1.0


def sums_terms(mechanism: Mechanism) -> bool:
    """Whether it, or a mechanism in some of its heads, declares terms of different growth."""
    kinds = [kind for kind, _ in mechanism.kinds] or [mechanism]
    return any("+" in kind.complexity for kind in kinds)


def log_power(mechanism: Mechanism) -> int:
    """The power of that factor in the cost of a whole sequence, as declared; that of a step is 1 at most."""
    return 2 if "log²" in mechanism.complexity else 1


def in_chunks(case: Case, size: int) -> Case:
    """The case with parts of this size, where it works in parts: in tiny ones counting takes half a minute.

    For all but `reformer`, whose chunks are of that size in use, what is computed does not depend on it.
    """
    return replace(case, options={**case.options, "chunk": size}) if "chunk" in case.options else case


def lean(case: Case, **site: Any) -> Stack:
    """The case's stack, cut to one layer if the second would cost the same."""
    stack = make(case, **site)
    stack.layers = stack.layers[:1] if case.alike else stack.layers
    return stack


def built_for(case: Case, most: int) -> Callable[[int], Stack]:
    """The case built for `most` positions, whatever the length that is asked for.

    Where the declared growth relies on options that follow the longest length (a stride), they are left to do so.
    """
    if case.mechanism.growth != 1.5:
        stack = lean(case, max_length=most, memory_length=most)
        return lambda length: stack
    following = {name for name, default in case.mechanism.options.items() if default is None}
    options = {name: value for name, value in case.options.items() if name not in following}
    return lambda length: lean(replace(case, options=options), max_length=length, memory_length=length)


def check_growth(built: Callable[[int], Stack], growth: float, case: Case | None, length: int) -> None:
    """Compares the cost at `length` with that at twice the length, one segment each."""
    highest = growth + MARGIN
    if case is not None:
        highest += log_power(case.mechanism) * math.log2(log_factor(case.mechanism, length, 2 * length))
    (once, flops), (twice, more_flops) = (
        work(built(size), tokens(1, size), memory_for(case, 1, size) if case else None) for size in (length, 2 * length)
    )
    assert exponent(once.largest, twice.largest) < highest, "the largest tensor grows faster"
    assert exponent(once.touched, twice.touched) < highest, "memory traffic grows faster"
    assert exponent(flops, more_flops) < highest, "operations grow faster"
    done = [exponent(once.touched, twice.touched), exponent(flops, more_flops)]
    if case is None or growth < 2 or not sums_terms(case.mechanism):  # else a term of lower growth may be the largest
        assert max(done) > growth - 0.4, f"growth = {growth} overstates the cost"
    if growth < 2:
        assert twice.largest < (2 * length) ** 2, "a tensor of T x S values"
        check_pairs(twice, 2 * length)


def check_pairs(counted: Count, length: int) -> None:
    """Asks that nothing was made of the shape T x S."""
    assert not any(sum(side >= length for side in shape) > 1 for shape in counted.shapes), "a T x S tensor"


@each(lambda case: case.setting != "small" and case.small and case.mechanism.growth < 2)
@torch.no_grad()
def test_nothing_of_all_pairs_is_held(case: Case) -> None:
    """A quick look at the variants and slots, whose growth only the slow tests measure."""
    stack = built_for(in_chunks(case, 32), 1024)(256)
    with Count() as counted:
        stack(tokens(1, 256), memory_for(case, 1, 256))
    check_pairs(counted, 256)


@each(
    lambda case: case.setting == "small" or (case.small and case.mechanism.growth < 2),
    slow=lambda case: case.setting != "small",
)
def test_cost_grows_with_the_length_as_declared(case: Case) -> None:
    length = 128 if case.mechanism.growth == 2 else 512
    case = in_chunks(case, 32)
    check_growth(built_for(case, 1024), case.mechanism.growth, case, length)


@pytest.mark.slow
@each(lambda case: case.setting == "default" and case.mechanism.growth < 2)
def test_cost_grows_as_declared_with_the_defaults(case: Case) -> None:
    check_growth(built_for(case, 16384), case.mechanism.growth, case, 8192)


@each(lambda case: case.setting == "small" and steps(case) and case.mechanism.growth == 1)
@torch.no_grad()
def test_a_step_costs_at_position_144_what_it_costs_at_36(case: Case) -> None:
    stack, medians = lean(case, max_length=300), []
    state = stack.start(1, memory_for(case, 1, 9))
    for walked in (32, 100):  # then eight steps are counted
        _, state = stack.walk(tokens(1, 1, walked), state)
        counts = [Count() for _ in range(8)]
        for counted in counts:
            with counted:
                _, state = stack.step(tokens(1, 1), state)
        medians.append(statistics.median(counted.touched for counted in counts))
    assert medians[1] < 1.05 * medians[0] * log_factor(case.mechanism, 36, 144)


class Scores(Attention):
    """Holds the scores of all pairs; declared linear, the check must catch it."""

    def attend(self, inputs: Inputs) -> Attended:
        scores = inputs.query @ inputs.query.transpose(1, 2)
        return Attended(scores.softmax(dim=-1) @ inputs.query * self.scale)

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.scale = torch.nn.Parameter(torch.ones(()))


def test_the_quick_check_catches_scores_of_all_pairs() -> None:
    with Count() as counted:
        Scores(Site("encoder", 32, 4))(tokens(1, 64))
    check_pairs(counted, 65)
    with pytest.raises(AssertionError, match="T x S"):
        check_pairs(counted, 64)


@pytest.mark.parametrize("growth", [1, 1.5])
def test_the_check_catches_scores_of_all_pairs(growth: float) -> None:
    with pytest.raises(AssertionError, match="grows faster"):
        check_growth(lambda length: Stack([Scores(Site("encoder", 32, 4))]), growth, None, 512)


def test_a_stride_given_takes_more_than_the_growth_of_one_that_follows_the_length() -> None:
    case = Case("strided", "encoder", "small", {"stride": 4})
    with pytest.raises(AssertionError, match="grow"):
        check_growth(lambda length: make(case, max_length=1024), case.mechanism.growth, case, 512)


def test_the_check_catches_an_overstated_growth() -> None:
    class Scale(Scores):
        def attend(self, inputs: Inputs) -> Attended:
            return Attended(inputs.query * self.scale)

    with pytest.raises(AssertionError, match="overstates"):
        check_growth(lambda length: Stack([Scale(Site("encoder", 32, 4))]), 2, None, 512)


def test_a_logarithm_is_allowed_only_where_one_is_declared() -> None:
    linear = replace(mechanisms()["full"], complexity="O(T)")
    assert log_factor(linear, 64, 256) == 1
    assert log_factor(replace(linear, complexity="O(T log T)"), 64, 256) == pytest.approx(8 / 6)
    assert log_factor(replace(linear, complexity="O(T log² T)"), 64, 256) == pytest.approx(8 / 6)
    assert [log_power(replace(linear, complexity=f"O(T {each} T)")) for each in ("log", "log²")] == [1, 2]
