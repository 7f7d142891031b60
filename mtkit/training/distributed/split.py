"""Gradients, moments, averages and, between updates, weights split over the processes.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5,
by PyTorch's `fully_shard`. Of N processes each keeps an Nth of everything that an update leaves behind. Each layer's
weights come together before it runs. They stay whole until the last backward pass of the update: processes have
different numbers of batches, and gather weights and send gradients once per update all the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mtkit.errors import RunError
from mtkit.training.distributed.world import World


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
