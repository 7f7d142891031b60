"""Every mechanism in every role on a GPU: outputs, gradients and steps beside the CPU's, and low precisions."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from mtkit.attention import reorder
from mtkit.attention.states import close_gaps
from tests.contract.cases import Case, all_cases, plain, valid_mask
from tests.contract.stack import Stack, apart, make, memory_for, tokens
from tests.gpu.check import Result, Setup, guarded
from tests.gpu.training import distance, own

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def contract(setup: Setup) -> Iterator[Result]:
    """Small and default options of every mechanism and role."""
    for case in own(setup, [case for case in all_cases() if plain(case) and setup.includes(case.name)]):
        torch.manual_seed(1)
        here = make(case)
        there = deepcopy(here).to(setup.device)
        subjects = here, there, _inputs(case)
        yield guarded(f"{case} float32", partial(_same, *subjects, setup.device))
        if case.role != "encoder":
            yield guarded(f"{case} steps", partial(_same_steps, *subjects, setup.device))
        for name, dtype in TYPES.items():
            if setup.device == "cuda" or name == "bfloat16":
                yield guarded(f"{case} {name}", partial(_low, *subjects, setup.device, dtype))


def _inputs(case: Case) -> dict[str, Tensor | None]:
    length = 29 if case.small else 70
    memory = memory_for(case, 3, 33)
    return {
        "query": tokens(3, length),
        "memory": memory,
        "query_valid": valid_mask([length, 20, 5], length),
        "memory_valid": None if memory is None else valid_mask([33, 20, 3], 33),
        "task": torch.tensor([0, 1, 0]) if case.small else None,  # defaults have one task
        "upstream": tokens(3, length),
    }


def _pass(
    stack: Stack, inputs: dict[str, Tensor | None], device: str, dtype: torch.dtype | None, *, train: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output at real positions and the gradients, on the CPU."""
    torch.manual_seed(7)
    stack.train(train).zero_grad()
    on = {name: None if value is None else value.to(device) for name, value in inputs.items()}
    query, upstream = on.pop("query"), on.pop("upstream")
    assert query is not None
    assert upstream is not None
    memory, valid = on.pop("memory"), on["query_valid"]
    if memory is None:
        on.pop("memory_valid")
    assert valid is not None
    with torch.autocast(torch.device(device).type, dtype or torch.bfloat16, enabled=dtype is not None):
        output = stack(query, memory, **on)
    (output.float() * upstream * valid.unsqueeze(2)).sum().backward()
    found = {name: each.grad.cpu() for name, each in stack.named_parameters() if each.grad is not None}
    return (output.detach().float() * valid.unsqueeze(2)).cpu(), found


def _same(here: Stack, there: Stack, inputs: dict[str, Tensor | None], device: str) -> Result:
    (expected, slopes), (actual, device_slopes) = (
        _pass(stack, inputs, on, None, train=False) for stack, on in ((here, "cpu"), (there, device))
    )
    scale = max(1.0, *(each.abs().max().item() for each in slopes.values()))
    slope = max((device_slopes[name] - each).abs().max().item() / scale for name, each in slopes.items())
    difference = apart(actual, expected)
    return {"ok": difference < 1e-4 and slope < 1e-3, "output": difference, "gradient": slope}


def _low(here: Stack, there: Stack, inputs: dict[str, Tensor | None], device: str, dtype: torch.dtype) -> Result:
    expected, _ = _pass(here, inputs, "cpu", None, train=False)
    low, _ = _pass(there, inputs, device, dtype, train=False)
    output, slopes = _pass(there, inputs, device, dtype, train=True)
    finite = output.isfinite().all() and all(each.isfinite().all() for each in slopes.values())
    # choices by near ties (buckets, clusters, top-k) may differ, and a stack of two layers doubles the rounding
    return {"ok": bool(finite and low.isfinite().all()), "from_float32": round(distance(low, expected), 4)}


@torch.no_grad()
def _walk(stack: Stack, inputs: dict[str, Tensor | None], device: str) -> Tensor:
    """Outputs of 15 steps, hypotheses reordered after each third and a segment left out after the ninth."""
    torch.manual_seed(7)
    stack.eval()
    memory, valid, task = (inputs[name] for name in ("memory", "memory_valid", "task"))
    query = tokens(3, 2, 15).to(device)
    memory, valid, task = (None if each is None else each.clone().to(device) for each in (memory, valid, task))
    state, outputs = stack.start(3, memory, valid, hypotheses=2, task=task), []
    for number in range(15):
        if number == 9:
            state = close_gaps(state, torch.tensor([0, 2], device=device))
        output, state = stack.step(query[: 3 if number < 9 else 2, :, number], state)
        outputs.append(output.flatten().float().cpu())
        if number % 3 == 2 and number < 9:
            state = reorder(state, torch.tensor([[1, 0], [0, 0], [1, 1]], device=device))
    return torch.cat(outputs)


def _same_steps(here: Stack, there: Stack, inputs: dict[str, Tensor | None], device: str) -> Result:
    difference = apart(_walk(there, inputs, device), _walk(here, inputs, "cpu"))
    finite = {}
    for name, dtype in TYPES.items():
        if device == "cuda":
            with torch.autocast("cuda", dtype):
                finite[name] = bool(_walk(there, inputs, device).isfinite().all())
    return {"ok": difference < 1e-4 and all(finite.values()), "apart": difference, **finite}
