"""Stacks of reversible sub-layers: a backward pass that recomputes activations from what came out of the stack.

Papers: Gomez et al., 2017, arXiv 1707.04585; Kitaev et al., 2020, arXiv 2001.04451, section 3.
Only the last two streams are kept, whatever the depth. The backward pass goes down the sub-layers: with (u, w) out of
one, its input was u, and a = w - f(u); f runs once more, with the same dropout, for its gradient. What an attention
chose (buckets, clusters, edges) is kept, a byte or two each, for u is the same but for rounding.
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
from mtkit.model.layers import Context, DecoderLayer, EncoderLayer, Passing, Stream


@dataclass(frozen=True)
class SubLayer:
    """One reversible sub-layer: what it does to a stream, beside the memory it reads, and its own parameters."""

    run: Callable[[Stream, Passing, Tensor | None], Stream]
    parameters: tuple[nn.Parameter, ...]


def encoder_sublayers(layer: EncoderLayer, valid: Tensor | None, task: Tensor | None) -> list[SubLayer]:
    """Both sub-layers of an encoder layer."""
    return [
        SubLayer(
            lambda x, passing, memory: layer.attend(x, passing, valid=valid, task=task),
            _parameters(layer.attention, layer.attention_residual),
        ),
        SubLayer(
            lambda x, passing, memory: layer.feed(x),
            _parameters(layer.feed_forward, layer.feed_forward_residual),
        ),
    ]


def decoder_sublayers(layer: DecoderLayer, context: Context) -> list[SubLayer]:
    """All three sub-layers of a decoder layer."""

    def attend_source(x: Stream, passing: Passing, memory: Tensor | None) -> Stream:
        assert memory is not None
        here = Context(memory, context.memory_valid, context.memory_carry, context.valid, context.task)
        return layer.attend_source(x, passing, here)

    return [
        SubLayer(
            lambda x, passing, memory: layer.attend_target(x, passing, context),
            _parameters(layer.self_attention, layer.self_residual),
        ),
        SubLayer(attend_source, _parameters(layer.cross_attention, layer.cross_residual)),
        SubLayer(
            lambda x, passing, memory: layer.feed(x),
            _parameters(layer.feed_forward, layer.feed_forward_residual),
        ),
    ]


def run_reversibly(sublayers: Sequence[SubLayer], x: Tensor, passing: Passing, memory: Tensor | None = None) -> Stream:
    """The streams that come out of the sub-layers, both x (B, T, D) at first; losses are summed into `passing`."""
    parameters = list(dict.fromkeys(each for sublayer in sublayers for each in sublayer.parameters))
    stack = _Stack(sublayers, parameters)
    a, b, log_prob, *losses = _Reversible.apply(stack, upcast(x), memory, *parameters)  # type: ignore[no-untyped-call]
    passing.sum_in(dict(zip(stack.names, losses, strict=True)), log_prob)
    return a, b


def refuse_carry(name: str, attention: Attention) -> None:
    """Raises: MtkitError where the attention `name` hands something to the next layer, which nothing could undo."""
    site, training = attention.site, attention.training
    attention.eval()
    with torch.no_grad():
        memory = torch.zeros(1, 2, site.memory_width or site.d_model) if site.role == "cross" else None
        carries = attention(torch.zeros(1, 2, site.d_model), memory).carry is not None
    attention.train(training)
    if carries:
        raise MtkitError(
            f"attention '{name}' has a carry in the {site.role} role, which reversible layers cannot have: "
            "set model.reversible to false, or choose an attention or option without carry"
        )


@dataclass
class _Stack:
    """The sub-layers of one pass, and what their recomputation needs to know of it."""

    sublayers: Sequence[SubLayer]
    parameters: list[nn.Parameter]
    names: tuple[str, ...] = ()
    """Names of the losses that the attentions return."""
    generators: list[list[Tensor]] = field(default_factory=list)
    """For each sub-layer the states of the random generators before it."""
    chosen: list[int] = field(default_factory=list)
    """How many choices each sub-layer made."""


class _Reversible(torch.autograd.Function):
    """From (x, memory, parameters) to both streams, the log-probability of what was sampled, and the losses."""

    @staticmethod
    def forward(
        ctx: Any, stack: _Stack, x: Tensor, memory: Tensor | None, *parameters: nn.Parameter
    ) -> tuple[Tensor | None, ...]:
        a, b, passing, choices = x, x, Passing(), list[Tensor]()
        for sublayer in stack.sublayers:
            stack.generators.append(_generators(x.device))
            with record_choices() as chosen:
                _, branch = sublayer.run((0.0, b), passing, memory)
            stack.chosen.append(len(chosen))
            choices += chosen
            a, b = b, a + branch
        losses = passing.losses or {}
        stack.names = tuple(losses)
        ctx.stack, ctx.autocast = stack, _autocast(x.device)
        ctx.save_for_backward(a, b, memory, *choices)
        return a, b, passing.log_prob, *losses.values()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        stack: _Stack = ctx.stack
        u, w, memory, *choices = ctx.saved_tensors
        grad_u, grad_w, grad_log_prob, *grad_losses = upstream
        grad_memory = None if memory is None else torch.zeros_like(memory)
        gradients: dict[nn.Parameter, Tensor] = {}
        every = zip(stack.sublayers, stack.generators, stack.chosen, strict=True)
        for sublayer, generators, count in reversed(list(every)):
            passing, first = Passing(), choices[len(choices) - count :]
            del choices[len(choices) - count :]
            read = u.detach().requires_grad_()
            beside = None if memory is None else memory.detach().requires_grad_()
            with torch.enable_grad(), ctx.autocast(), _replayed(generators, u.device), replay_choices(first):
                _, branch = sublayer.run((0.0, read), passing, beside)
            outputs, grads = [branch], [grad_w.to(branch.dtype)]
            by_name = dict(zip(stack.names, grad_losses, strict=True))
            raised = [(loss, by_name[name]) for name, loss in (passing.losses or {}).items()]
            if passing.log_prob is not None:
                raised.append((passing.log_prob, grad_log_prob))
            for value, grad in raised:
                if value.requires_grad:
                    outputs.append(value)
                    grads.append(grad.to(value.dtype))
            wanted = [each for each in sublayer.parameters if each.requires_grad]
            inputs = [read, *([] if beside is None else [beside]), *wanted]
            own, *others = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
            if grad_memory is not None:
                of_memory = others.pop(0)
                grad_memory = grad_memory if of_memory is None else grad_memory + of_memory
            for parameter, grad in zip(wanted, others, strict=True):
                if grad is not None:
                    gradients[parameter] = gradients[parameter] + grad if parameter in gradients else grad
            u, w = w - branch.detach(), u
            grad_u, grad_w = grad_w, grad_u if own is None else grad_u + own  # None: no value of it was read
        return None, grad_u + grad_w, grad_memory, *(gradients.get(each) for each in stack.parameters)


def _parameters(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
    """The modules' own, and those of what an attention uses together with others."""
    shared = [each for module in modules if isinstance(module, Attention) for each in module.site.shared.values()]
    # the one that owns what is shared has it twice
    return tuple(dict.fromkeys(parameter for module in (*modules, *shared) for parameter in module.parameters()))


def _generators(device: torch.device) -> list[Tensor]:
    """The states of the generators that dropout draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


@contextmanager
def _replayed(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """The generators as they were, and back where they are afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield


def _autocast(device: torch.device) -> Callable[[], torch.autocast]:
    """What switches the arithmetic of now on again."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    # without its cache of weights in that type: those of the first pass have no graph
    return lambda: torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=False)
