"""Sums of gradients over the processes that train together, and models sharded over them.

Each process takes every n-th row of each global batch, and losses are divided by the tokens of the whole update. So the
sum of all gradients, not their mean, is what one process would have computed. If a process has no row of a small batch,
or a parameter no part in a batch, its gradients are zeros, and no process waits for it.

On GPUs the sum overlaps the last backward pass of the update: DistributedDataParallel sends a bucket of gradients as
soon as it is complete. On CPUs the sum follows the pass, because the sending threads would take its cores.

Sharding: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section
5, by PyTorch's `fully_shard`. Each of N processes keeps an Nth of gradients, moments, averages and, between updates,
weights. Each layer's weights are gathered before it runs and stay gathered until the last backward pass of the update:
processes have different numbers of batches, but must gather weights and send gradients equally often.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mtkit.errors import RunError
from mtkit.memory import OOM_ERRORS, is_oom
from mtkit.training.world import World

OVERLAPPED = ("cuda",)
"""Types of device on which sums overlap the backward pass."""

BUCKET_ELEMENTS = 8 << 20
"""Gradient elements summed over the processes in one call: 32 MB in float32."""


class GradientReduction(Protocol):
    """Sums the gradients of an update: the update calls `backward` for each batch, then `finish`."""

    def backward(self, objective: Tensor | None, *, last: bool) -> None:
        """Add the gradients of a scalar to the parameters' `grad`; None means an objective that is zero.

        `last` is true in exactly one call per update and process. Raises: RunError if memory runs out during the sum,
        so that the call cannot be repeated.
        """
        ...

    def finish(self, totals: Tensor) -> None:
        """Wait until every `grad` is the sum over all processes, and replace `totals` by their sums."""
        ...


def build_reduction(model: nn.Module, world: World, dtype: str) -> "FlatReduction | OverlappedReduction":
    """Return the reduction for an unsharded model; gradients are sent in `dtype`, "float32" or "bfloat16"."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if world.size > 1 and world.device.type in OVERLAPPED:
        return OverlappedReduction(trained, world, getattr(torch, dtype))
    return FlatReduction(trained, world.size, getattr(torch, dtype))


class FlatReduction:
    """Sums after all backward passes, many small gradients in one call; does nothing for one process."""

    def __init__(self, parameters: Sequence[nn.Parameter], processes: int, dtype: torch.dtype) -> None:
        self._parameters, self._processes, self._dtype = parameters, processes, dtype

    def backward(self, objective: Tensor | None, *, last: bool) -> None:
        if objective is not None:
            objective.backward()

    def finish(self, totals: Tensor) -> None:
        if self._processes == 1:
            return
        # parameters that had no part in any process keep no gradient: the optimiser leaves them as they are
        have = torch.tensor([parameter.grad is not None for parameter in self._parameters]).float()
        dist.all_reduce(have)
        for parameter, count in zip(self._parameters, have.tolist(), strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        sum_in_buckets(gradients, self._dtype)
        dist.all_reduce(totals)


class OverlappedReduction:
    """Sums during the last backward pass, by DistributedDataParallel with a hook.

    It wraps the objective, not the model: the loss is more than the model's forward pass, and a process without rows
    runs none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, dtype: torch.dtype) -> None:
        self._device = world.device
        self._ddp = DistributedDataParallel(_Identity(parameters), init_sync=False, gradient_as_bucket_view=True)
        self._ddp.register_comm_hook(dtype, _sum_bucket)
        world.close_at_end(self)

    def close(self) -> None:
        """Release the process group: no sum after this."""
        del self._ddp

    def backward(self, objective: Tensor | None, *, last: bool) -> None:
        if objective is None:
            objective = torch.zeros((), device=self._device, requires_grad=True)
        with nullcontext() if last else self._ddp.no_sync():
            wrapped = self._ddp(objective)
        try:
            wrapped.backward()
        except OOM_ERRORS as error:
            if not last or not is_oom(error):
                raise
            raise RunError(
                f"out of memory on {self._device} in a backward pass while its gradients were being summed over the "
                "processes; halve --batch-tokens and double --accumulate, under another --name"
            ) from error

    def finish(self, totals: Tensor) -> None:
        dist.all_reduce(totals)


class _Identity(nn.Module):
    """Returns the objective as a function of all parameters, including parameters that had no part in it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)

    def forward(self, objective: Tensor) -> Tensor:
        wrapped: Tensor = _DependOnAll.apply(objective, *self.trained)  # type: ignore[no-untyped-call]
        return wrapped


class _DependOnAll(torch.autograd.Function):
    """The first argument; the others' gradients are None, which suffices for each to count as complete."""

    @staticmethod
    def forward(ctx: Any, objective: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        return objective.view_as(objective)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream[0], *[None] * ctx.parameters


def _sum_bucket(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Hook: sum a bucket's gradients over all processes, sent in this type."""
    gradients = bucket.buffer()
    sent = gradients.to(dtype)
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


def sum_in_buckets(tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
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
    for work in [dist.all_reduce(bucket, async_op=True) for bucket in flat]:
        work.wait()
    for bucket, summed in zip(buckets, flat, strict=True):
        pieces = summed.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [piece.view_as(tensor) for piece, tensor in zip(pieces, bucket, strict=True)])


class ShardedModel:
    """A model sharded over the processes of a world, and the reduction of its gradients."""

    def __init__(self, model: nn.Module, world: World, dtype: str, blank_objective: Callable[[], Tensor]) -> None:
        """The model's parameters become `DTensor`s; gradients are sent in `dtype`, "float32" or "bfloat16".

        `blank_objective` runs the model and returns a scalar that is zero, for a process without rows.

        Raises: RunError if PyTorch is too old.
        """
        # late, because these modules take 0.4 s and 40 MB, and few trainings are sharded
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise RunError(f"training.shard needs PyTorch 2.13 or later, and this is {torch.__version__}")
        options: dict[str, Any] = {
            "mesh": init_device_mesh(world.device.type, (world.size,)),
            "reshard_after_forward": False,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=getattr(torch, dtype), cast_forward_inputs=False),
        }
        for layer in _layers(model):
            fully_shard(layer, **options)
        self._blank_objective = blank_objective
        self._root: Any = fully_shard(model, **options)
        self._parts: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # a sum, not a mean
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)

    def backward(self, objective: Tensor | None, *, last: bool) -> None:
        objective = self._blank_objective() if objective is None else objective
        self._root.set_requires_gradient_sync(last)
        self._root.set_reshard_after_backward(last)
        objective.backward()

    def finish(self, totals: Tensor) -> None:
        dist.all_reduce(totals)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Inside, each process has all weights and may compute on its own; all processes must enter it."""
        for part in self._parts:
            part.unshard()
        try:
            yield
        finally:
            for part in self._parts:
                part.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, without its import."""
    return hasattr(tensor, "full_tensor")


def complete_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor if it is sharded, gathered from all processes; else the tensor."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def gather_full(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Full tensors on the CPU if `keep`, else nothing; all processes must call it; it gathers one tensor at a time."""
    full: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        complete = complete_tensor(tensor)
        if keep:
            full[name] = complete.detach().cpu() if is_sharded(tensor) else complete
    return full


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a full tensor, if `like` is sharded; else the tensor."""
    if not is_sharded(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    # all processes have read the same file: nothing is sent
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return the layers of encoder and decoder; none if a parameter belongs to two of them."""
    layers = [
        layer
        for stack in (getattr(model, name, None) for name in ("encoder", "decoder"))
        if isinstance(stack, nn.ModuleList)
        for layer in stack
    ]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return layers if len(parameters) == len(set(parameters)) else []
