"""Stacks of reversible sub-layers: the backward pass recomputes activations from the stack's output.

Papers: Gomez et al., 2017, arXiv 1707.04585; Kitaev et al., 2020, arXiv 2001.04451, section 3.
Only the last two streams are kept, at any depth. The backward pass goes down the sub-layers: with the output (u, w) of
one, its input was u, and a = w - f(u); f runs again, with the same dropout, for its gradient. The discrete choices of
attentions (buckets, clusters, edges) are kept, a byte or two each, because u is the same only up to rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mtkit.attention import Attention
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.reproducible import record_choices, replay_choices
from mtkit.errors import MtkitError
from mtkit.model.layers import StackPass, SubLayer
from mtkit.model.sublayers import Stream


def run_reversibly(
    sublayers: Sequence[SubLayer], x: Tensor, stack_pass: StackPass, memory: Tensor | None = None
) -> Stream:
    """Run x (B, T, D), as both streams, through the sub-layers; losses are summed into `stack_pass`."""
    stack = _Stack(sublayers, [_parameters(*sublayer.modules) for sublayer in sublayers])
    a, b, log_prob, *losses = _Reversible.apply(stack, upcast(x), memory, *stack.all_parameters)  # type: ignore[no-untyped-call]
    stack_pass.add(dict(zip(stack.names, losses, strict=True)), log_prob)
    return a, b


def refuse_carry(name: str, attention: Attention) -> None:
    """Raises: MtkitError if the attention `name` passes a carry to the next layer, which cannot be reversed."""
    site, training = attention.site, attention.training
    attention.eval()
    with torch.no_grad():
        memory = torch.zeros(1, 2, site.memory_width or site.d_model) if site.role == "cross" else None
        carry = attention(torch.zeros(1, 2, site.d_model), memory).carry
    attention.train(training)
    if carry is not None:
        raise MtkitError(
            f"attention '{name}' has a carry in the {site.role} role, which reversible layers cannot have: "
            "set model.reversible to false, or choose an attention or option without carry"
        )


@dataclass
class _Stack:
    """The sub-layers of one pass, and the data for their recomputation."""

    sublayers: Sequence[SubLayer]
    parameters: list[tuple[nn.Parameter, ...]]
    """The parameters of each sub-layer."""
    names: tuple[str, ...] = ()
    """Names of the losses that the attentions return."""
    generators: list[list[Tensor]] = field(default_factory=list)
    """The states of the random generators before each sub-layer."""
    chosen: list[int] = field(default_factory=list)
    """The number of choices in each sub-layer."""

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """The parameters of all sub-layers, each once."""
        return list(dict.fromkeys(parameter for own in self.parameters for parameter in own))


class _Reversible(torch.autograd.Function):
    """A function of (x, memory, parameters): both streams, the log-probability of sampled choices, and the losses."""

    @staticmethod
    def forward(
        ctx: Any, stack: _Stack, x: Tensor, memory: Tensor | None, *parameters: nn.Parameter
    ) -> tuple[Tensor | None, ...]:
        a, b, stack_pass, choices = x, x, StackPass(), list[Tensor]()
        for sublayer in stack.sublayers:
            stack.generators.append(_generators(x.device))
            with record_choices() as chosen:
                _, branch = sublayer.run((0.0, b), stack_pass, memory)
            stack.chosen.append(len(chosen))
            choices += chosen
            a, b = b, a + branch
        losses = stack_pass.losses or {}
        stack.names = tuple(losses)
        ctx.stack, ctx.autocast = stack, _autocast(x.device)
        ctx.save_for_backward(a, b, memory, *choices)
        return a, b, stack_pass.log_prob, *losses.values()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        stack: _Stack = ctx.stack
        u, w, memory, *choices = ctx.saved_tensors
        grad_u, grad_w, grad_log_prob, *grad_losses = upstream
        grad_memory = None if memory is None else torch.zeros_like(memory)
        gradients: dict[nn.Parameter, Tensor] = {}
        passed = list(zip(stack.sublayers, stack.parameters, stack.generators, stack.chosen, strict=True))
        for sublayer, parameters, generators, count in reversed(passed):
            stack_pass, first = StackPass(), choices[len(choices) - count :]
            del choices[len(choices) - count :]
            x = u.detach().requires_grad_()
            source = None if memory is None else memory.detach().requires_grad_()
            with torch.enable_grad(), ctx.autocast(), _replayed(generators, u.device), replay_choices(first):
                _, branch = sublayer.run((0.0, x), stack_pass, source)
            outputs, grads = [branch], [grad_w.to(branch.dtype)]
            by_name = dict(zip(stack.names, grad_losses, strict=True))
            extra = [(loss, by_name[name]) for name, loss in (stack_pass.losses or {}).items()]
            if stack_pass.log_prob is not None:
                extra.append((stack_pass.log_prob, grad_log_prob))
            for value, grad in extra:
                if value.requires_grad:
                    outputs.append(value)
                    grads.append(grad.to(value.dtype))
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            inputs = [x, *([] if source is None else [source]), *trained]
            grad_x, *others = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
            if grad_memory is not None:
                grad_source = others.pop(0)
                grad_memory = grad_memory if grad_source is None else grad_memory + grad_source
            for parameter, grad in zip(trained, others, strict=True):
                if grad is not None:
                    gradients[parameter] = gradients[parameter] + grad if parameter in gradients else grad
            u, w = w - branch.detach(), u
            grad_u, grad_w = grad_w, grad_u if grad_x is None else grad_u + grad_x  # None: f does not depend on x
        return None, grad_u + grad_w, grad_memory, *(gradients.get(parameter) for parameter in stack.all_parameters)


def _parameters(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
    """The modules' parameters, including modules that an attention shares with others."""
    shared = [part for module in modules if isinstance(module, Attention) for part in module.site.shared.values()]
    # the attention that owns a shared module has it twice
    return tuple(dict.fromkeys(parameter for module in (*modules, *shared) for parameter in module.parameters()))


def _generators(device: torch.device) -> list[Tensor]:
    """The states of dropout's generators."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def _replayed(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """Inside, the generators have these states; they are restored afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield


def _autocast(device: torch.device) -> Callable[[], torch.autocast]:
    """A context with the present autocast settings."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    # without its cache of low-precision weights: the first pass's have no graph
    return lambda: torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=False)
