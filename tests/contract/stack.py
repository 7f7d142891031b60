"""The subject of the contract tests: attentions one above the other, whole sequences at once and step by step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention import Attended, Attention, State
from tests.contract.cases import Case


class Stack(nn.Module):
    """Attentions with a residual and a norm between them; what one carries goes to the next, as in a model.

    The last has no residual around it: a test that asks whether a change is seen must not be answered by the sum.
    Without the norm, scores grow from layer to layer, and a mechanism of several softmaxes makes much of rounding.
    """

    def __init__(self, layers: list[Attention]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.site = layers[0].site

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        memory_valid: Tensor | None = None,
        task: Tensor | None = None,
        query_marks: Tensor | None = None,
        memory_marks: Tensor | None = None,
        form: str = "forward",
    ) -> Tensor:
        """(B, T, D) of the last, from query (B, T, D) and memory (B, S, M); `form` is `forward` or `naive`."""
        marks = {"query_marks": query_marks, "memory_marks": memory_marks}
        masks = {"query_valid": query_valid, "memory_valid": memory_valid}
        return self.attend(query, memory, task=task, form=form, **masks, **marks)[0]

    def attend(self, query: Tensor, memory: Tensor | None = None, *, form: str = "forward", **given: Any) -> Any:
        """The output, what the last layer carries, and the log-probabilities (B,) of what layers sampled."""
        output, carry, sampled = None, None, []
        for layer in self.layers:
            query = query if output is None else between(query, output)
            attend = layer if form == "forward" else getattr(layer, form)  # called itself, it calls its hooks
            attended = attend(query, memory, carry=carry, **given)
            output, carry = attended.output, attended.carry
            sampled += [] if attended.log_prob is None else [attended.log_prob]
        return output, carry, sampled

    def start(
        self,
        batch_size: int,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
        hypotheses: int = 1,
        task: Tensor | None = None,
        memory_marks: Tensor | None = None,
    ) -> State:
        """The states of all layers, in a state that `reorder` works on."""
        states, carry, given = [], None, {"hypotheses": hypotheses, "task": task, "memory_marks": memory_marks}
        for layer in self.layers:
            state, carry = layer.start(batch_size, memory, memory_valid, carry=carry, **given)
            states.append(state)
        return {"layers": states}

    def step(self, query: Tensor, state: State, query_marks: Tensor | None = None) -> tuple[Tensor, State]:
        """(B, N, D) for the next position of N hypotheses, and the state after it."""
        output, states, carry = None, [], None
        for layer, before in zip(self.layers, state["layers"], strict=True):
            query = query if output is None else between(query, output)
            attended, after = layer.step(query, before, carry=carry, query_marks=query_marks)
            output, carry = attended.output, attended.carry
            states.append(after)
        return output, {"layers": states}

    def walk(self, query: Tensor, state: State, query_marks: Tensor | None = None) -> tuple[Tensor, State]:
        """(B, N, T, D) from T steps over query (B, N, T, D) with marks (B, N, T), and the state after them."""
        outputs = []
        for position, token in enumerate(query.unbind(2)):
            output, state = self.step(token, state, None if query_marks is None else query_marks[:, :, position])
            outputs.append(output)
        return torch.stack(outputs, dim=2), state


def between(query: Tensor, output: Tensor) -> Tensor:
    """What the next layer reads."""
    return F.layer_norm(query + output, output.shape[-1:])


def make(case: Case, *, stir: bool = True, **site: Any) -> Stack:
    """The case's stack in evaluation; stirred, no parameter stays at a zero that would hide what it does."""
    stack = Stack([case.build(layer=layer, **site) for layer in range(case.layers)]).eval()
    if stir:
        with torch.no_grad():
            for parameter in stack.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
    return stack


@contextmanager
def heads_of_zero(stack: nn.Module) -> Iterator[None]:
    """A context in which every `out_proj` reads zeros; an attention without one makes zeros."""
    with ExitStack() as hooks:
        for module in stack.modules():
            if hasattr(module, "out_proj"):
                hook = module.out_proj.register_forward_pre_hook(lambda _, given: (torch.zeros_like(given[0]),))
                hooks.callback(hook.remove)
            elif isinstance(module, Attention) and not any(hasattr(part, "out_proj") for part in module.modules()):
                hook = module.register_forward_hook(lambda _, given, attended: _with_zeros(attended))
                hooks.callback(hook.remove)
        yield


def _with_zeros(attended: Attended) -> Attended:
    return replace(attended, output=torch.zeros_like(attended.output))


def tokens(*shape: int, width: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random token vectors (*shape, width)."""
    return torch.randn(*shape, width, dtype=dtype)


def memory_for(case: Case, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Random memory (*shape, M) in the cross role, None in the self roles."""
    if case.role != "cross":
        return None
    return tokens(*shape, width=case.memory_width or 32, dtype=dtype)


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the size of the values where that is above 1; NaN counts as infinite."""
    if one.numel() == 0:
        return 0.0
    scale = max(1.0, other.detach().abs().max().item())
    return torch.nan_to_num((one - other).detach().abs(), nan=float("inf")).max().item() / scale
