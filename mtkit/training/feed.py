"""What each update trains on: a place in the data that is two numbers, and the batches from there on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtkit.data.batches import Batch, plan, prefetched
from mtkit.data.prepared import Prepared, Side
from mtkit.errors import DataError
from mtkit.recipe import Recipe
from mtkit.training.distributed import World


@dataclass(frozen=True)
class Work:
    """The batches of one update."""

    batches: list[Batch]
    """Those of this process; a small global batch may leave it none."""
    tokens: int
    """Real target tokens of the whole update, over all processes and batches: what its loss is a mean over."""
    rows: list[np.ndarray]
    """Rows of the training side, each global batch of the update, over all processes."""
    epoch: int
    batch: int
    """The place in the data after this update: `epoch`, and how many of its global batches are used up."""


@dataclass(frozen=True)
class Inputs:
    """A batch on the device, as the model and the loss take it. N real target tokens."""

    source: Tensor
    source_valid: Tensor | None
    """(B, S), or None where nothing is padding: attention without a mask is faster."""
    target_in: Tensor
    target_valid: Tensor | None
    places: Tensor
    """(N,): where the real target tokens stand in the flattened (B * T,) batch."""
    target: Tensor
    """(N,): the token to predict at each place."""
    width: int
    """T: place // T is the segment."""


class Feed:
    """The training side, cut into updates; where it starts is found without going through what came before."""

    def __init__(self, recipe: Recipe, prepared: Prepared, longest: int, world: World) -> None:
        self.side = prepared.train
        self._batch_tokens = recipe.training.batch_tokens
        self._accumulate = recipe.training.accumulate
        self._longest = longest
        self._seed = recipe.seed
        self._world = world
        given = prepared.settings.train
        self._source_name = prepared.folder / "text" / "train.en" if given is None else given.source
        self.batches_per_epoch = len(self.plan(0))
        """Global batches of the first epoch; others may differ by a few."""
        self.updates_per_epoch = -(-self.batches_per_epoch // self._accumulate)
        if not self.batches_per_epoch:
            raise DataError(
                f"no training segment in {prepared.folder} fits the model: all {len(self.side):,} of them have more "
                f"than {longest} pieces on one side; raise model.max_length"
            )

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The rows of every global batch of an epoch."""
        return plan(self.side, batch_tokens=self._batch_tokens, max_length=self._longest, seed=self._seed, epoch=epoch)

    def updates(self, epoch: int, batch: int) -> Iterator[Work]:
        """Without end, from this place on; an epoch's last update takes the batches that are left."""
        while True:
            yield from self._rest_of(epoch, batch)
            epoch, batch = epoch + 1, 0

    def _rest_of(self, epoch: int, begin: int) -> Iterator[Work]:
        world, whole = self._world, self.plan(epoch)
        # rank r takes rows r, r + n, ...: neighbours in length go to different processes, so that they finish together
        mine = [rows[world.rank :: world.size] for rows in whole[begin:]]
        made = prefetched(self.side, [rows for rows in mine if len(rows)], pin=world.device.type == "cuda")
        for first in range(begin, len(whole), self._accumulate):
            rows = whole[first : first + self._accumulate]
            own = mine[first - begin : first - begin + self._accumulate]
            batches = [next(made) for each in own if len(each)]
            used = first + len(rows)
            place = (epoch, used) if used < len(whole) else (epoch + 1, 0)
            yield Work(batches, count_tokens(self.side, rows), rows, *place)

    def name_lines(self, rows: Sequence[np.ndarray]) -> str:
        """The lines of the input files that these rows come from, as "lines 3, 8 and 12 of train.en"."""
        numbers = np.sort(np.concatenate([self.side.lines[each] for each in rows]))
        return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of {self._source_name}"


def count_tokens(side: Side, batches: Sequence[np.ndarray]) -> int:
    """Target tokens that batches of these rows predict, the end mark of each segment among them."""
    return sum(int(side.target.lengths[rows].sum()) + len(rows) for rows in batches)


def to_device(batch: Batch, device: torch.device) -> Inputs:
    """The batch as the model takes it; all that depends on its contents is worked out before it leaves the host."""
    places = batch.target_valid.flatten().nonzero().squeeze(1)
    target = batch.target_out.flatten()[places]
    if batch.source.is_pinned():
        places, target = places.pin_memory(), target.pin_memory()

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return Inputs(
        source=move(batch.source),
        source_valid=None if bool(batch.source_valid.all()) else move(batch.source_valid),
        target_in=move(batch.target_in),
        target_valid=None if bool(batch.target_valid.all()) else move(batch.target_valid),
        places=move(places),
        target=move(target),
        width=batch.target_in.shape[1],
    )
