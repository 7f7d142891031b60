"""Marks (which sentence of its document a token belongs to) change only mechanisms that read them, and as they say."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtkit.attention import Attended, Attention, Beginning, Inputs, Site, State, build, mechanisms, reorder
from mtkit.attention.marks import marks_from, sentences
from tests.contract.cases import Case, all_cases, each, plain, small, small_options, steps, valid_mask
from tests.contract.counting import Count
from tests.contract.slots import taken
from tests.contract.stack import Stack, apart, make, memory_for, tokens
from tests.contract.test_cost import check_pairs
from tests.contract.test_naive import CLOSE as EXACT
from tests.contract.test_steps import REORDERED, tensors

CLOSE, STEPS_CLOSE = 1e-5, 1e-4
LENGTH, SOURCE = 23, 17
BREAKS = 0.25
"""Share of tokens that are breaks: in 23 tokens, sentences of 1 to 8."""


def marks_like(*shape: int) -> Tensor:
    """Marks (..., T) of documents; the first token is no break."""
    breaks = torch.rand(shape) < BREAKS
    breaks[..., 0] = False
    return marks_from(breaks)


@cache
def readers() -> frozenset[str]:
    """The names of the small cases with a layer that reads marks; each is built once."""
    cases = [case for case in all_cases() if case.small]
    return frozenset(str(case) for case in cases if any(case.build(layer=layer).reads_marks for layer in range(2)))


def reads(case: Case) -> bool:
    """Whether a layer of the case reads marks."""
    return str(case) in readers()


def given(case: Case, segments: int = 3) -> dict[str, Any]:
    """Tokens and marks of documents, for `Stack.forward`."""
    memory = memory_for(case, segments, SOURCE)
    source = {} if memory is None else {"memory": memory, "memory_marks": marks_like(segments, SOURCE)}
    return {"query": tokens(segments, LENGTH), "query_marks": marks_like(segments, LENGTH), **source}


def without_marks(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if not name.endswith("marks")}


def with_zeros(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value * 0 if name.endswith("marks") else value for name, value in inputs.items()}


def gradients(stack: Stack, inputs: dict[str, Any]) -> list[Tensor | None]:
    """The output, and the gradients of every parameter."""
    stack.zero_grad()
    output = stack(**inputs)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return [output, *(parameter.grad for parameter in stack.parameters())]


def walked(stack: Stack, query: Tensor, inputs: dict[str, Any], marks: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """The outputs of steps over query (B, N, T, D), and the tensors of the last state."""
    state = stack.start(len(query), inputs.get("memory"), hypotheses=query.shape[1], memory_marks=memory_marks(inputs))
    output, state = stack.walk(query, state, marks)
    return output, [value for _, value in tensors(state)]


def memory_marks(inputs: dict[str, Any]) -> Tensor | None:
    marks: Tensor | None = inputs.get("memory_marks")
    return marks


@each(small, slow=lambda case: not (plain(case) or reads(case)))
def test_marks_that_are_not_read_change_no_bit(case: Case) -> None:
    stack, inputs = make(case), given(case)
    if any(layer.reads_marks for layer in stack.layers):
        return
    plain, marked = (gradients(stack, arguments) for arguments in (without_marks(inputs), inputs))
    for one, other in zip(plain, marked, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    if steps(case):
        query, marks = tokens(3, 2, 6), marks_like(3, 2, 6)
        with torch.no_grad():
            (expected, kept), (output, others) = (
                walked(stack, query, *arguments) for arguments in ((without_marks(inputs), None), (inputs, marks))
            )
        assert torch.equal(output, expected)
        assert [value.shape for value in kept] == [value.shape for value in others], "marks are kept"
        # of caches, only what has been written is compared: the rest is not initialised


@each(small, slow=lambda case: not reads(case))
@torch.no_grad()
def test_without_marks_all_are_zero(case: Case) -> None:
    stack, inputs = make(case), given(case)
    expected = stack(**with_zeros(inputs))
    assert apart(stack(**without_marks(inputs)), expected) < CLOSE
    if steps(case):
        query, marks = tokens(3, 2, 9), torch.zeros(3, 2, 9, dtype=torch.long)
        output, _ = walked(stack, query, with_zeros(inputs), marks)
        assert apart(output, walked(stack, query, without_marks(inputs), None)[0]) < STEPS_CLOSE


@each(reads)
@torch.no_grad()
def test_marks_are_read_by_order_and_separators_alone(case: Case) -> None:
    stack, inputs = make(case), given(case)
    expected = stack(**inputs)
    assert apart(stack(**with_zeros(inputs)), expected) > 1e-3, "no mark is read"
    later = {name: value + 2 * 1000 if name.endswith("marks") else value for name, value in inputs.items()}
    assert apart(stack(**later), expected) < CLOSE


@each(reads)
@torch.no_grad()
def test_marks_at_padding_change_nothing_and_a_segment_alone_is_the_same(case: Case) -> None:
    stack, inputs = make(case), given(case, 4)
    query_lengths, memory_lengths = [LENGTH, 12, 5, 1], [9, SOURCE, 1, 4]
    masks = {"query_valid": valid_mask(query_lengths, LENGTH)}
    if case.role == "cross":
        masks["memory_valid"] = valid_mask(memory_lengths, SOURCE)
    together = stack(**inputs, **masks)
    for row, lengths in enumerate(zip(query_lengths, memory_lengths, strict=True)):
        by_side = dict(zip(("query", "memory"), lengths, strict=True))
        alone = {name: x[row : row + 1, : by_side[name.partition("_")[0]]] for name, x in inputs.items()}
        assert apart(together[row : row + 1, : lengths[0]], stack(**alone)) < CLOSE, f"segment {row}"
    for name, side in (("query_marks", "query"), ("memory_marks", "memory")):
        if name in inputs:
            valid = masks[f"{side}_valid"]
            inputs[name] = inputs[name].where(valid, torch.randint_like(inputs[name], 1000))
    other = stack(**inputs, **masks)
    assert apart(other[masks["query_valid"]], together[masks["query_valid"]]) < CLOSE, "a mark at padding is read"


@each(lambda case: reads(case) and hasattr(case.mechanism.kind, "naive"))
def test_forward_is_the_equation_with_marks(case: Case) -> None:
    stack, inputs = make(case).double(), given(case)
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    masks = {"query_valid": valid_mask([LENGTH, 12, 5], LENGTH)}
    if case.role == "cross":
        masks["memory_valid"] = valid_mask([9, SOURCE, 1], SOURCE)
    fast, literal = (stack(**inputs, **masks, form=form)[masks["query_valid"]] for form in ("forward", "naive"))
    assert apart(fast, literal) < EXACT
    weight = torch.randn_like(fast)
    pair = [torch.autograd.grad((form * weight).sum(), list(stack.parameters())) for form in (fast, literal)]
    assert all(apart(*both) < EXACT for both in zip(*pair, strict=True))


@each(lambda case: reads(case) and steps(case))
@torch.no_grad()
def test_later_marks_change_nothing_earlier(case: Case) -> None:
    stack, inputs = make(case), given(case)
    expected = stack(**inputs)
    for cut in range(1, LENGTH):
        other = inputs["query_marks"].clone()
        other[:, cut:] = other[:, cut - 1 : cut] // 2 * 2 + marks_like(3, LENGTH - cut + 1)[:, 1:]
        output = stack(**{**inputs, "query_marks": other})
        assert apart(output[:, :cut], expected[:, :cut]) < CLOSE, f"a row before {cut} saw a mark from there on"
        ahead = {name: x[:, :cut] if name.startswith("query") else x for name, x in inputs.items()}
        assert apart(stack(**ahead), expected[:, :cut]) < CLOSE, f"a prefix of {cut} gives something else alone"


def check_steps(stack: Stack, case: Case) -> None:
    """Steps of three hypotheses that break at different steps, and again after each way to reorder them."""
    query, marks, inputs = tokens(3, 3, LENGTH), marks_like(3, 3, LENGTH), given(case)
    memory, source_marks = inputs.get("memory"), memory_marks(inputs)
    memory_valid = valid_mask([SOURCE, 1, 6], SOURCE) if memory is not None else None

    def whole() -> Tensor:
        source = (memory, memory_valid, source_marks)
        memory_inputs = [None if x is None else x.repeat_interleave(query.shape[1], 0) for x in source]
        named = dict(zip(("memory", "memory_valid", "memory_marks"), memory_inputs, strict=True))
        return stack(query.flatten(0, 1), query_marks=marks.flatten(0, 1), **named).unflatten(0, query.shape[:2])

    state = stack.start(3, memory, memory_valid, hypotheses=3, memory_marks=source_marks)
    output, state = stack.walk(query, state, marks)
    assert apart(output, whole()) < STEPS_CLOSE, "steps differ from forward"
    for index in REORDERED.values():
        state = reorder(state, index)
        if index.dim() == 1:
            query, marks = query[index], marks[index]
            memory, memory_valid, source_marks = (
                None if x is None else x[index] for x in (memory, memory_valid, source_marks)
            )
        else:
            query, marks = query.take_along_dim(index[..., None, None], 1), marks.take_along_dim(index[..., None], 1)
        more = marks[..., -1:] // 2 * 2 + marks_like(*query.shape[:2], 8)[..., 1:]
        query, marks = torch.cat([query, tokens(*query.shape[:2], 7)], 2), torch.cat([marks, more], 2)
        output, state = stack.walk(query[:, :, -7:], state, marks[:, :, -7:])
        assert apart(output, whole()[:, :, -7:]) < STEPS_CLOSE, f"steps differ after reorder by {index.tolist()}"


@each(lambda case: reads(case) and steps(case))
@torch.no_grad()
def test_hypotheses_that_break_at_different_steps_step_as_forward(case: Case) -> None:
    check_steps(make(case), case)


@each(reads)
def test_marks_survive_low_precision_and_checkpoints(case: Case) -> None:
    stack, inputs = make(case).train(), given(case)
    expected = gradients(stack, inputs)
    stack.zero_grad()
    for reentrant in (False, True):
        query = inputs["query"].clone().requires_grad_()
        output = checkpoint(
            lambda query: stack(**{**inputs, "query": query}), query, use_reentrant=reentrant, preserve_rng_state=True
        )
        assert apart(output, expected[0]) < CLOSE
        stack.zero_grad()
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        for one, other in zip(expected[1:], (parameter.grad for parameter in stack.parameters()), strict=True):
            assert (one is None) == (other is None)
            assert one is None or apart(other, one) < CLOSE
    late = {name: value + 2 * 1001 if name.endswith("marks") else value for name, value in inputs.items()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # bfloat16 has no 1001
        assert apart(stack(**late).float(), expected[0]) < 0.05


@each(lambda case: reads(case) and case.mechanism.growth < 2)
@torch.no_grad()
def test_nothing_of_all_pairs_is_made_from_marks(case: Case) -> None:
    length, memory = 512, memory_for(case, 1, 512)
    source = {} if memory is None else {"memory": memory, "memory_marks": marks_like(1, length)}
    with Count() as counted:
        make(case, max_length=length)(tokens(1, length), query_marks=marks_like(1, length), **source)
    check_pairs(counted, length)


GUIDED = [
    pytest.param(name, role, id=f"{name}-{role}")
    for name, mechanism in mechanisms().items()
    for role in ("encoder", "decoder")
    if role in mechanism.roles and mechanism.weights and ("regularizer", "guided") in taken(mechanism, role)
]


@pytest.mark.parametrize(("name", "role"), GUIDED)
def test_a_regularizer_gets_the_marks_from_every_mechanism_that_takes_it(name: str, role: str) -> None:
    options = small_options(mechanisms()[name].kind)
    regularizer = {"name": "guided", "patterns": "separator:1", "weight": 1.0}
    stack = Stack([build(name, role=role, d_model=32, heads=4, regularizer=regularizer, **options)]).train()
    (attention,), query, marks = stack.layers, tokens(2, 9), marks_from(torch.arange(9).expand(2, 9) % 3 == 1)
    assert attention.reads_marks
    valid = valid_mask([9, 6], 9)
    assert attention(query, query_valid=valid).losses["guided"] == 0
    assert attention(query, query_valid=valid, query_marks=marks).losses["guided"] > 0


class SentenceMeans(Attention):
    """Means over the tokens of a sentence up to the query; wrong in the way that `fault` says."""

    reads_marks = True

    def __init__(self, fault: str = "") -> None:
        super().__init__(Site("decoder", 32, 4))
        self.fault = fault

    def attend(self, inputs: Inputs) -> Attended:
        marks = torch.zeros(inputs.query.shape[:2]) if inputs.query_marks is None else sentences(inputs.query_marks)
        if self.fault == "ahead":
            marks = marks.roll(-1, 1)
        same = (marks.unsqueeze(2) == marks.unsqueeze(1)).float().tril()
        return Attended(same / same.sum(2, keepdim=True) @ inputs.query)

    def begin(self, inputs: Beginning) -> tuple[State, None]:
        shape = (inputs.batch_size, inputs.hypotheses)
        return {"sums": torch.zeros(*shape, 32), "count": torch.zeros(shape), "last": torch.zeros(shape)}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        assert inputs.query_marks is not None
        sentence = sentences(inputs.query_marks)
        stays = sentence == state["last"]
        if self.fault == "first":
            stays = stays[:, :1].expand_as(stays)
        sums = state["sums"] * stays.unsqueeze(2) + inputs.query
        count = state["count"] * stays + 1
        return Attended(sums / count.unsqueeze(2)), {"sums": sums, "count": count, "last": sentence}


DECODER = Case("full", "decoder", "small")
"""For the role and widths of the checks alone."""


def test_the_check_catches_hypotheses_that_share_a_sentence_number() -> None:
    check_steps(Stack([SentenceMeans()]), DECODER)
    with pytest.raises(AssertionError, match="steps differ"):
        check_steps(Stack([SentenceMeans("first")]), DECODER)


def test_the_check_catches_a_mark_that_is_read_too_early() -> None:
    with pytest.raises(AssertionError, match="steps differ"):
        check_steps(Stack([SentenceMeans("ahead")]), DECODER)
