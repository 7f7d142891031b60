"""Batches on the device, moved there one at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtkit.data.batches import Batch


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device, for the model and the loss. Its N target tokens are the real ones, or all B * T."""

    source: Tensor
    source_valid: Tensor | None
    """(B, S), or None without padding: attention without a mask is faster."""
    source_lengths: Tensor | None
    """(B,), on the host: real source tokens of each segment; None without padding."""
    target_in: Tensor
    target_valid: Tensor | None
    places: Tensor | None
    """(N,): indices of the target tokens in the flattened (B * T,) batch; None: all of them."""
    target: Tensor
    """(N,): the token to predict at each place."""
    width: int
    """T."""
    real: Tensor | None = None
    """(N,): True for real target tokens; None: all of them."""
    task: Tensor | None = None
    """(B,): the direction of each segment; None if there is only one."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> "DeviceBatch":
        """Move a batch to the device; everything that depends on its contents is computed on the host before."""
        padded = not bool(batch.source_valid.all())
        places = batch.target_valid.flatten().nonzero().squeeze(1)
        target = batch.target_out.flatten()[places]
        if batch.source.is_pinned():
            places, target = places.pin_memory(), target.pin_memory()

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return cls(
            source=move(batch.source),
            source_valid=move(batch.source_valid) if padded else None,
            source_lengths=batch.source_valid.sum(1) if padded else None,
            target_in=move(batch.target_in),
            target_valid=None if bool(batch.target_valid.all()) else move(batch.target_valid),
            places=move(places),
            target=move(target),
            width=batch.target_in.shape[1],
            task=None if batch.task is None else move(batch.task),
        )

    @classmethod
    def on_grid(cls, batch: Batch, device: torch.device) -> "DeviceBatch":
        """Move a batch to the device with all its target tokens and masks: its shapes depend on the batch's only."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        target_valid = move(batch.target_valid)
        return cls(
            source=move(batch.source),
            source_valid=move(batch.source_valid),
            source_lengths=None,
            target_in=move(batch.target_in),
            target_valid=target_valid,
            places=None,
            target=move(batch.target_out).flatten(),
            width=batch.target_in.shape[1],
            real=target_valid.flatten(),
            task=None if batch.task is None else move(batch.task),
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments of `Network.forward`."""
        names = ("source", "target_in", "source_valid", "source_lengths", "target_valid", "task")
        return {name: getattr(self, name) for name in names}

    @property
    def segments(self) -> Tensor:
        """(N,): the segment of each target token."""
        places = torch.arange(len(self.target), device=self.target.device) if self.places is None else self.places
        return places // self.width

    def predicting(self, hidden: Tensor) -> Tensor:
        """Return the vectors (N, D) of hidden (B, T, D) that predict the target tokens."""
        rows = hidden.flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)


class DeviceBatches:
    """Batches that are moved to the device one at a time; `current` is the one being computed, else None."""

    def __init__(self, batches: Sequence[Batch], load: Callable[[Batch], DeviceBatch]) -> None:
        self._batches, self._load = batches, load
        self.current: Batch | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[DeviceBatch]:
        for batch in self._batches:
            self.current = batch
            yield self._load(batch)
        self.current = None
