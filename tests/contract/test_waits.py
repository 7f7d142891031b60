"""Training on an accelerator reads no value from it, for which the host would wait, and the device for the host."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtkit.attention import Attended, Attention, Site
from tests.contract.cases import Case, each, small, valid_mask
from tests.contract.stack import Stack, make, memory_for, tokens


@pytest.fixture(autouse=True)
def _no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mechanisms disable autocast by the name of the device, and the meta device has none."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())


def update(stack: Stack, memory: Tensor | None = None) -> None:
    """A forward and a backward pass, and what follows an update, on the meta device.

    Its tensors have shapes and no values: PyTorch raises if Python, or the shape of a result, depends on a value. What
    a mechanism does for the CPU alone it does not do there.
    """
    stack.train().to("meta")
    memory = None if memory is None else memory.to("meta").requires_grad_()
    output, _, sampled = stack.attend(
        tokens(3, 29).to("meta").requires_grad_(),
        memory,
        query_valid=valid_mask([29, 20, 5], 29).to("meta"),
        memory_valid=None if memory is None else valid_mask([33, 20, 3], 33).to("meta"),
        task=torch.tensor([0, 1, 0]).to("meta"),
    )
    torch.stack([each.sum() for each in (output, *sampled)]).sum().backward()
    for layer in stack.layers:
        layer.after_update(1, 10)


@each(small, slow=lambda case: case.setting != "small")
def test_training_reads_no_value_from_the_device(case: Case) -> None:
    update(make(case), memory_for(case, 3, 33))


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.max().item(),
    "if": lambda x: 1 if x.max() > 0 else 0,
    "int": lambda x: int(x.max()),
    "list": Tensor.tolist,
    "copy": Tensor.cpu,
    "places": Tensor.nonzero,
    "mask": lambda x: x[x > 0],
    "counts": lambda x: x.repeat_interleave(x[0, :, 0].long(), 1),
    "backward": lambda x: x.register_hook(lambda gradient: gradient * gradient.max().item()),
    "nothing": lambda x: x.max(),
}


class Reads(Attention):
    """Reads a value in one of these ways."""

    def __init__(self, site: Site, read: Callable[[Tensor], Any]) -> None:
        super().__init__(site)
        self.read, self.scale = read, nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, *_: object, **__: object) -> Attended:  # type: ignore[override]
        self.read(query)
        return Attended(query * self.scale)


@pytest.mark.parametrize("way", READS)
def test_the_check_catches_each_way_to_read_a_value(way: str) -> None:
    raised = pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta")
    with nullcontext() if way == "nothing" else raised:
        update(Stack([Reads(Site("encoder", 32, 4), READS[way])]))
