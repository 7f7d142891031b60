"""Sums of gradients over the processes that train together.

Each process takes every n-th row of each global batch, and losses are divided by the tokens of the whole update, so the
sum of all gradients is what one process would have computed; a mean over processes is not. A process may have no row of
a small batch, and a parameter no part in a batch: their gradients are zeros, and nobody waits for them.

On GPUs the sum overlaps the last backward pass of the update: DistributedDataParallel sends a bucket of gradients as
soon as it is complete. On CPUs it follows the pass, because the threads that send would take the cores from it.

Gradients, moments, averages and, between updates, weights split over the processes.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5,
by PyTorch's `fully_shard`. Of N processes each keeps an Nth of everything that an update leaves behind. Each layer's
weights come together before it runs. They stay whole until the last backward pass of the update: processes have
different numbers of batches, and gather weights and send gradients once per update all the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mtkit.errors import RunError
from mtkit.memory import GIVES_OUT, is_oom
from mtkit.training.world import World

OVERLAPPED = ("cuda",)
"""Types of device on which sums overlap the backward pass."""

BUCKET_ELEMENTS = 8 << 20
"""Gradient elements summed over the processes in one call: 32 MB in float32."""


class GradientSum(Protocol):
    """How the gradients of an update come together. An update calls `backward` for each batch, then `finish`."""

    def backward(self, objective: Tensor | None, *, last: bool) -> None:
        """Add the gradients of a scalar to the parameters' `grad`; None stands for an objective that is zero.

        `last` is true in exactly one call per update and process. Raises: RunError where memory gives out while the
        sum is under way, so that the call cannot be made again.
        """
        ...

    def finish(self, totals: Tensor) -> None:
        """Wait until every `grad` is the sum over all processes, and replace `totals` by their sums."""
        ...


def gradient_sum(model: nn.Module, world: World, dtype: str) -> GradientSum:
    """The sum for this model on the world's devices; gradients travel in `dtype`, "float32" or "bfloat16"."""
    trained = [each for each in model.parameters() if each.requires_grad]
    if world.size > 1 and world.device.type in OVERLAPPED:
        return OverlappedSum(trained, world, getattr(torch, dtype))
    return FlatSum(trained, world.size, getattr(torch, dtype))


class FlatSum:
    """After all backward passes, many small gradients in one call. One process has nothing to sum."""

    def __init__(self, parameters: Sequence[nn.Parameter], processes: int, dtype: torch.dtype) -> None:
        self._parameters, self._processes, self._dtype = parameters, processes, dtype

    def backward(self, objective: Tensor | None, *, last: bool) -> None:
        if objective is not None:
            objective.backward()

    def finish(self, totals: Tensor) -> None:
        if self._processes == 1:
            return
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        sum_together(gradients, self._dtype)
        dist.all_reduce(totals)


class OverlappedSum:
    """During the last backward pass, by DistributedDataParallel with a hook that sums.

    It wraps not the model but the objective: the loss is more than the model's forward pass, and a process without rows
    makes none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, dtype: torch.dtype) -> None:
        self._device = world.device
        self._together = DistributedDataParallel(_Through(parameters), init_sync=False, gradient_as_bucket_view=True)
        self._together.register_comm_hook(dtype, _summed)
        world.close_at_end(self)

    def close(self) -> None:
        """Let go of the processes: no sum after this."""
        del self._together

    def backward(self, objective: Tensor | None, *, last: bool) -> None:
        if objective is None:
            objective = torch.zeros((), device=self._device, requires_grad=True)
        with nullcontext() if last else self._together.no_sync():
            reached = self._together(objective)
        try:
            reached.backward()
        except GIVES_OUT as error:
            if not last or not is_oom(error):
                raise
            raise RunError(
                f"the memory of {self._device} gave out in a backward pass while its gradients were being summed over "
                "the processes; lower --batch-tokens and raise --accumulate by as much, under another --name"
            ) from error

    def finish(self, totals: Tensor) -> None:
        dist.all_reduce(totals)


class _Through(nn.Module):
    """The objective as it is, now a function of all parameters, also of those that had no part in it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)

    def forward(self, objective: Tensor) -> Tensor:
        reached: Tensor = _Reach.apply(objective, *self.trained)  # type: ignore[no-untyped-call]
        return reached


class _Reach(torch.autograd.Function):
    """The first argument. The gradients of the others are none, which is enough for each to be counted as complete."""

    @staticmethod
    def forward(ctx: Any, objective: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        return objective.view_as(objective)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream[0], *[None] * ctx.parameters


def _summed(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The hook: the sum of a bucket's gradients over all processes, sent in this type."""
    gradients = bucket.buffer()
    sent = gradients.to(dtype)
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


def sum_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Sum each tensor over all processes in place, many small ones in one call, sent in this type."""
    buckets: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled + tensor.numel() > BUCKET_ELEMENTS and buckets[-1]:
            buckets.append([])
            filled = 0
        buckets[-1].append(tensor)
        filled += tensor.numel()
    flat = [torch.cat([tensor.reshape(-1) for tensor in bucket]).to(dtype) for bucket in buckets]
    for work in [dist.all_reduce(each, async_op=True) for each in flat]:
        work.wait()
    for bucket, summed in zip(buckets, flat, strict=True):
        pieces = summed.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [piece.view_as(tensor) for piece, tensor in zip(pieces, bucket, strict=True)])


class SplitModel:
    """A model split over the processes of a world, and the sum of its gradients (a `GradientSum`)."""

    def __init__(self, model: nn.Module, world: World, dtype: str) -> None:
        """The model's parameters become `DTensor`s; gradients travel in `dtype`, "float32" or "bfloat16".

        Raises: RunError where PyTorch is too old.
        """
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise RunError(f"training.shard needs PyTorch 2.13 or later, and this is {torch.__version__}")
        how: dict[str, Any] = {
            "mesh": init_device_mesh(world.device.type, (world.size,)),
            "reshard_after_forward": False,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=getattr(torch, dtype), cast_forward_inputs=False),
        }
        for layer in _layers(model):
            fully_shard(layer, **how)
        self._root: Any = fully_shard(model, **how)
        self._parts: list[Any] = [each for each in model.modules() if isinstance(each, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # a sum, not a mean
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)

    def backward(self, objective: Tensor | None, *, last: bool) -> None:
        assert objective is not None, "a process without rows takes part with an objective that weighs nothing"
        self._root.set_requires_gradient_sync(last)
        self._root.set_reshard_after_backward(last)
        objective.backward()

    def finish(self, totals: Tensor) -> None:
        dist.all_reduce(totals)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model computes with whole weights, and processes need not do the same; for all at once."""
        for part in self._parts:
            part.unshard()
        try:
            yield
        finally:
            for part in self._parts:
                part.reshard()


def gathered(tensors: Mapping[str, Tensor], *, kept: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU where `kept`, and nothing else; all processes take part, one tensor at a time."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        complete = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if kept:
            whole[name] = complete.detach().cpu() if isinstance(tensor, DTensor) else complete
    return whole


def split_like(value: Tensor, own: Tensor) -> Tensor:
    """This process's part of a whole tensor, split as `own` is; the tensor where `own` is whole."""
    if not isinstance(own, DTensor) or value.shape != own.shape:
        return value
    # all processes have read the same file: nothing is sent
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    """The layers of encoder and decoder; none where a parameter belongs to two of them."""
    layers = [
        layer
        for stack in (getattr(model, name, None) for name in ("encoder", "decoder"))
        if isinstance(stack, nn.ModuleList)
        for layer in stack
    ]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return layers if len(parameters) == len(set(parameters)) else []
