"""Promise 6: gradients reach what can matter and are right, and bfloat16 stays near float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mtkit.attention.bases import pattern_attention
from mtkit.attention.bases.pattern_attention import PatternAttention
from mtkit.attention.lowrank._landmarks import LandmarkAttention
from mtkit.attention.marks import marks_from
from mtkit.attention.positions import POSITIONS
from mtkit.training.optimization.low_weights import LowWeights
from tests.contract.cases import Case, each, once, plain, small, steps, valid_mask
from tests.contract.stack import Stack, make, memory_for, tokens

LENGTHS = [9, 4]
LONGER = [80, 4]
"""Where every token of nine would see itself alone by default, nothing would reach its query, nor what is read of rows
and blocks before its own."""
ALONE = {f"positions={name}" for name in POSITIONS}


def masks(case: Case, lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    """Ragged masks for a query and a memory, of nine tokens unless `lengths` says otherwise."""
    valid = valid_mask(lengths, lengths[0])
    return {"query_valid": valid, "memory_valid": valid} if case.role == "cross" else {"query_valid": valid}


@each()
def test_gradients_reach_every_parameter_but_a_key_bias_that_cancels(case: Case) -> None:
    whole = make(case).double().train()
    # what is below a layer that does not read its query cannot matter
    layers: list[Any] = list(whole.layers)
    stacks = [whole] if layers[-1].reads_query else [Stack([layer]) for layer in layers]
    for stack in stacks:
        check_reached(case, stack)


def check_reached(case: Case, stack: Stack) -> None:
    """Asks for a gradient of every parameter, from outputs, what is carried on, and what was sampled."""
    lengths = LENGTHS if case.small else LONGER
    query, memory = tokens(2, lengths[0], dtype=torch.float64), memory_for(case, 2, lengths[0], dtype=torch.float64)
    passed: list[Tensor] = []  # outputs stay in a model's stream, also where the next layer reads no query
    for layer in stack.layers[:-1]:
        layer.register_forward_hook(lambda *call: passed.append(call[2].output))
    breaks = (torch.arange(query.shape[1]) == 2).long().expand(2, -1)  # some parameters serve only separators
    output, carry, sampled = stack.attend(query, memory, **masks(case, lengths), query_marks=marks_from(breaks))
    loss = torch.zeros((), dtype=torch.float64)
    for each_output in (output, *passed):
        real = each_output[masks(case, lengths)["query_valid"]]
        loss = loss + (real * torch.randn_like(real)).sum()
    for each_carried in tree_leaves(carry):  # what only a next layer would read
        if isinstance(each_carried, Tensor) and each_carried.requires_grad:
            loss = loss + (each_carried * torch.randn_like(each_carried)).sum()
    for log_prob in sampled:
        loss = loss + (log_prob * torch.randn_like(log_prob)).sum()
    loss.backward()
    largest = max(parameter.grad.abs().max() for parameter in stack.parameters() if parameter.grad is not None)
    for name, parameter in stack.named_parameters():
        reached = parameter.grad is not None and parameter.grad.abs().max() > 1e-10 * largest
        assert reached or name.endswith("k_proj.bias"), f"no gradient reaches {name}"


def tiny(case: Case) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A function of query, memory and all parameters that gives the outputs at real positions, and those inputs."""
    stack = make(case, d_model=8, heads=2, memory_width=None).double()
    names = [name for name, _ in stack.named_parameters()]
    query, memory = tokens(2, 9, width=8, dtype=torch.float64), tokens(2, 9, width=8, dtype=torch.float64)

    def attend(query: Tensor, memory: Tensor, *parameters: Tensor) -> Tensor:
        arguments = (query, memory if case.role == "cross" else None)
        output: Tensor = functional_call(stack, dict(zip(names, parameters, strict=True)), arguments, masks(case))
        return output[masks(case)["query_valid"]]

    inputs = [query, memory, *(parameter.detach() for parameter in stack.parameters())]
    return attend, [each.clone().requires_grad_() for each in inputs]


def check_gradients(compute: Callable[..., Tensor], inputs: list[Tensor], size: float = 1e-6) -> None:
    """Compares the slope along a random direction in all inputs at once, of length 1 in each, with a difference."""
    output = compute(*inputs)
    weight = torch.randn_like(output)
    gradients = torch.autograd.grad((output * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
    direction = [F.normalize(torch.randn_like(each), dim=None) for each in inputs]
    slopes = [(gradient * along).sum() for gradient, along in zip(gradients, direction, strict=True)]
    with torch.no_grad():
        ends = [compute(*torch._foreach_add(inputs, direction, alpha=way * size)) for way in (1, -1)]
    difference = ((ends[0] - ends[1]) * weight).sum() / (2 * size)
    scale = max(1.0, *(slope.abs().item() for slope in slopes))
    assert (sum(slopes) - difference).abs() < 1e-6 * scale, "the gradient is not the slope"


@each(small)
def test_gradients_match_a_finite_difference(case: Case) -> None:
    check_gradients(*tiny(case))


@pytest.mark.slow
@each(small)
def test_gradients_match_finite_differences_in_each_input(case: Case) -> None:
    assert torch.autograd.gradcheck(*tiny(case), fast_mode=True)


def test_the_check_catches_a_gradient_that_is_wrong_in_one_input() -> None:
    x, y = torch.randn(3, 4, dtype=torch.float64).requires_grad_(), torch.randn(4, dtype=torch.float64).requires_grad_()
    check_gradients(lambda x, y: (x * y).sin(), [x, y])
    with pytest.raises(AssertionError, match="not the slope"):
        check_gradients(lambda x, y: (x * (1.001 * y - 0.001 * y.detach())).sin(), [x, y])


def relative(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, relative to that of the second."""
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def gradient(stack: Stack) -> Tensor:
    """All parameters' gradients as one vector; they are cleared."""
    found = [each.grad.flatten() for each in stack.parameters() if each.grad is not None]
    stack.zero_grad()
    return torch.cat(found)


def both_types(stack: Stack, *arguments: Any, **masks: Tensor) -> tuple[Tensor, Tensor]:
    """The output under bfloat16 autocast and in float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low: Tensor = stack(*arguments, **masks)
    return low, stack(*arguments, **masks)


@each(lambda case: plain(case) or case.setting in ALONE, slow=lambda case: not plain(case))
def test_bfloat16_stays_within_2_percent_of_float32(case: Case) -> None:
    stack = make(case, stir=False, max_length=1024, memory_length=1024)
    stack.layers = stack.layers[:1]  # the promise is of one attention; a second would add its own 2%
    low, high = both_types(stack, tokens(2, 150), memory_for(case, 2, 150))
    assert low.isfinite().all()
    assert relative(low, high) < 0.02
    low.float().square().sum().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in stack.parameters())


@each(lambda case: plain(case) and issubclass(case.mechanism.kind, PatternAttention | LandmarkAttention))
def test_a_short_segment_in_bfloat16_is_near_float32(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns under one mask, and at the defaults a landmark for each token; gradients too."""
    monkeypatch.setattr(pattern_attention, "SHORT", 40)
    stack = make(case, stir=False)
    stack.layers = stack.layers[:1]
    query, memory, given = tokens(2, 40), memory_for(case, 2, 40), masks(case, [40, 23])
    found = []
    for output in both_types(stack, query, memory, **given):
        real = output[given["query_valid"]].float()
        real.square().sum().backward()
        found.append((real, gradient(stack)))
    (low, slopes), (high, wanted) = found
    assert relative(low, high) < 0.02
    assert relative(slopes, wanted) < 0.03


@each()
def test_weights_in_bfloat16_serve_as_float32_ones_under_autocast(case: Case) -> None:
    """What trains and decodes in bfloat16 on the CPU: matrices, and the tokens that pass, in that type."""
    # always two, whose random numbers the bounds are for: at others, routing may make more of rounding
    stack = Stack([case.build(layer=layer) for layer in range(2 if case.small else 1)]).train()
    stack.layers = stack.layers[:1]
    query, memory, given = tokens(2, 9).bfloat16(), memory_for(case, 2, 9), masks(case)
    memory = None if memory is None else memory.bfloat16()
    low = LowWeights(stack)
    upstream = tokens(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = stack(query, memory, **given)
        (expected * upstream).sum().backward()
        right = gradient(stack)
        with low.in_place():
            output = stack(query, memory, **given)
            (output * upstream).sum().backward()
    slopes = gradient(stack)
    assert output.dtype == torch.bfloat16
    assert all(each.dtype == torch.float32 for each in stack.parameters())
    lost, slopes_lost = relative(output, expected), relative(slopes, right)
    if lost >= 0.02 or slopes_lost >= 0.05:
        # what is made of rounding (routing sharpens it where heads are nearly alike) is made of autocast's own as well
        exact = stack(query.float(), None if memory is None else memory.float(), **given)
        (exact * upstream).sum().backward()
        assert lost < min(0.03, max(0.02, 2 * relative(expected, exact)))
        assert slopes_lost < max(0.05, 2 * relative(right, gradient(stack)))
    if steps(case):
        with torch.no_grad():
            check_low_steps(stack.eval(), low, memory)


def check_low_steps(stack: Stack, low: LowWeights, memory: Tensor | None) -> None:
    """Asks steps with weights in bfloat16 for what `forward` gives with them."""
    query = tokens(2, 1, 9).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16), low.in_place():
        output, _ = stack.walk(query, stack.start(2, memory))
        expected = stack(query.flatten(0, 1), memory).unflatten(0, (2, 1))
    assert output.dtype == torch.bfloat16
    lost = relative(output, expected)
    if lost >= 0.02:  # routing makes much of rounding, also of that in a whole sequence
        exact = stack(query.flatten(0, 1).float(), None if memory is None else memory.float()).unflatten(0, (2, 1))
        assert lost < min(0.03, 3 * relative(expected, exact)), "steps differ from forward"


@each(lambda case: small(case) and once(case))
@torch.no_grad()
def test_a_module_converted_to_bfloat16_attends_in_it(case: Case) -> None:
    """At a length that crosses every border: steps in the next test are few."""
    stack, length = make(case, stir=False).bfloat16(), case.long
    query, memory = tokens(2, length, dtype=torch.bfloat16), memory_for(case, 2, length, dtype=torch.bfloat16)
    output = stack(query, memory, **masks(case, [length, 9]))
    assert output.dtype == torch.bfloat16
    assert output.isfinite().all()


@each(steps)
@torch.no_grad()
def test_a_module_converted_to_bfloat16_steps_in_it(case: Case) -> None:
    """As its `forward` does, to five roundings of 2**-8; one rounding may turn the choice of a bucket or an edge."""
    stack = make(case, stir=False).eval().bfloat16()
    query, memory = tokens(2, 3, 9).bfloat16(), memory_for(case, 2, 9)
    memory = None if memory is None else memory.bfloat16()
    output, _ = stack.walk(query, stack.start(2, memory, hypotheses=3))
    expected = stack(query.flatten(0, 1), None if memory is None else memory.repeat_interleave(3, 0))
    assert output.dtype == expected.dtype == torch.bfloat16
    assert output.isfinite().all()
    lost = (output.flatten(0, 1) - expected).double().norm(dim=-1).flatten()
    alike = lost.argsort()[: len(lost) * 9 // 10]
    assert lost[alike].norm() < 0.02 * expected.double().norm(dim=-1).flatten()[alike].norm()


@each(plain)
@torch.no_grad()
def test_large_values_stay_finite(case: Case) -> None:
    stack = make(case)
    output = stack(100 * tokens(2, 9), memory_for(case, 2, 9), **masks(case))
    assert output.isfinite().all()
