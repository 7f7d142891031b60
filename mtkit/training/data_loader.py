"""What each update trains on: a place in the data that is two numbers, and the batches from there on."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mtkit.data.batches import Batch, make_batch, prefetched
from mtkit.data.epochs import EpochPart, EpochPlan, plan_epoch
from mtkit.data.prepared import Prepared, Side
from mtkit.data.resampling import Resegmentation, joined, strength_of
from mtkit.errors import DataError
from mtkit.recipe import Recipe
from mtkit.text.corpora import name_of
from mtkit.training.world import World

DRAWN_TOGETHER = 1 << 19
"""Pieces a side, about, that subword regularisation draws before their rows are sorted into batches: seconds of work,
and rows enough that batches hold hardly any padding. More where batches are large."""


@dataclass(frozen=True)
class Work:
    """The batches of one update on this process, and where they stand in the data."""

    batches: list[Batch]
    """Those of this process; a small global batch may leave it none."""
    tokens: int
    """Real target tokens of the whole update, over all processes and batches: what its loss is a mean over."""
    rows: list[np.ndarray]
    """Rows of the epoch's side, each global batch of the update, over all processes."""
    epoch: int
    batch: int
    """The place in the data after this update: `epoch`, and how many of its global batches are used up."""


@dataclass(frozen=True)
class Inputs:
    """A batch on the device, as the model and the loss take it. N real target tokens."""

    source: Tensor
    source_valid: Tensor | None
    """(B, S), or None where nothing is padding: attention without a mask is faster."""
    source_lengths: Tensor | None
    """(B,), on the host: how many source tokens of each segment are real; None where nothing is padding."""
    target_in: Tensor
    target_valid: Tensor | None
    places: Tensor
    """(N,): where the real target tokens stand in the flattened (B * T,) batch."""
    target: Tensor
    """(N,): the token to predict at each place."""
    width: int
    """T: place // T is the segment."""
    task: Tensor | None = None
    """(B,): the direction of each segment; None where there is only one."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> "Inputs":
        """The batch as the model takes it; all that depends on its contents is worked out before it leaves the host."""
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


@dataclass(frozen=True)
class _Epoch:
    """The rows of an epoch, and how they are cut into batches."""

    number: int
    side: Side
    plan: EpochPlan


@dataclass(frozen=True)
class _Rows:
    """A global batch: its rows of the epoch's side, and their places in the side that has their pieces."""

    rows: np.ndarray
    side: Side
    places: np.ndarray


@dataclass(frozen=True)
class _Made:
    """A global batch, of which this process has its own part, or none."""

    rows: np.ndarray
    tokens: int
    own: Batch | None


class Feed:
    """The training side, cut into updates; where it starts is found without going through what came before."""

    def __init__(self, recipe: Recipe, prepared: Prepared, longest: int, world: World) -> None:
        self._side, self._documents = prepared.train, prepared.settings.documents
        self._batch_tokens = recipe.training.batch_tokens
        self._accumulate = recipe.training.accumulate
        self._longest = longest
        self._seed = recipe.seed
        self._world = world
        corpora, text = prepared.settings.train, prepared.folder / "text" / "train.en"
        self._weights = [corpus.weight for corpus in corpora]
        self._source_names = [name_of(corpus, "source") for corpus in corpora] or [str(text)]
        strength = strength_of(
            prepared.settings.tokenizer,
            dropout=recipe.training.subword_dropout,
            alpha=recipe.training.subword_alpha,
        )
        self._resegmentation = (
            Resegmentation(
                prepared.tokenizers, prepared.settings.tokenizer.kind, strength, longest=longest, seed=recipe.seed
            )
            if strength
            else None
        )
        self._last: _Epoch | None = None
        self.batches_per_epoch = self._epoch(0).plan.batches
        """Global batches of the first epoch; others may differ by some."""
        self.updates_per_epoch = -(-self.batches_per_epoch // self._accumulate)
        if not self.batches_per_epoch and self._side.too_long(longest) < len(self._side):
            raise DataError(
                f"the weights of the corpora in {prepared.folder} leave an epoch without a pair; raise the weight in "
                "data.train, and prepare again"
            )
        if not self.batches_per_epoch:
            raise DataError(
                f"no training segment in {prepared.folder} fits the model: all {len(self._side):,} of them have more "
                f"than {longest} pieces on one side; raise model.max_length"
            )

    def side(self, epoch: int) -> Side:
        """The rows of an epoch: those of the training side, or of its documents, joined anew each time."""
        return self._epoch(epoch).side

    def plan(self, epoch: int) -> Iterator[np.ndarray]:
        """The rows of every global batch of an epoch, as they are where no pieces are drawn."""
        laid = self._epoch(epoch)
        for part, _ in laid.plan.parts():
            yield from part.planned(laid.side)

    def _epoch(self, number: int) -> "_Epoch":
        """The layout of an epoch; the last one asked for is kept."""
        if self._last is None or self._last.number != number:
            side = self._side
            if self._documents is not None:
                side = joined(side, min(self._documents.pieces, self._longest - 1), seed=self._seed, epoch=number)
            plan = plan_epoch(
                side,
                batch_tokens=self._batch_tokens,
                max_length=self._longest,
                seed=self._seed,
                epoch=number,
                weights=self._weights,
                pieces=None if self._resegmentation is None else max(DRAWN_TOGETHER, 32 * self._batch_tokens),
            )
            self._last = _Epoch(number, side, plan)
        return self._last

    def largest(self) -> list[Batch]:
        """This process's part of the batches of the first epoch that take the most memory: by tokens, and by width."""
        side, plan = self.side(0), self._epoch(0).plan
        most, found = [(0, 0), (0, 0)], dict[int, np.ndarray]()
        for rows in (rows for window in plan.heaviest for part in plan.draw(window) for rows in part.planned(side)):
            if len(own := self._own(rows)):
                width = 1 + max(int(each.lengths[own].max()) for each in (side.source, side.target))
                for by, size in enumerate(((len(own) * width, width), (width, len(own) * width))):
                    if size > most[by]:
                        most[by], found[by] = size, own.copy()
        same = len(found) == 2 and np.array_equal(found[0], found[1])
        return [make_batch(side, own, self._longest) for own in list(found.values())[: 1 if same else 2]]

    def samples(self, count: int) -> list[Work]:
        """Updates of one global batch each: of a row for every process, then of up to `count` widths, evenly spread.

        They are of the first epoch, as it is where no pieces are drawn, and the same in every process.
        """
        laid = self._epoch(0)
        side = laid.side
        first, _ = next(laid.plan.parts())
        batches = sorted(first.planned(side), key=lambda rows: int(side.target.lengths[rows].max()))
        count = min(count, len(batches))
        chosen = [batches[(2 * number + 1) * len(batches) // (2 * count)] for number in range(count)]
        return [
            Work(
                batches=[make_batch(side, own, self._longest)] if len(own := self._own(rows)) else [],
                tokens=count_tokens(side, [rows]),
                rows=[rows],
                epoch=0,
                batch=0,
            )
            for rows in (chosen[0][: self._world.size], *chosen)
        ]

    def updates(self, epoch: int, batch: int) -> Generator[Work, None, None]:
        """Endless updates from this place on. The last update of an epoch has the remaining batches."""
        while True:
            yield from self._rest_of(epoch, batch)
            epoch, batch = epoch + 1, 0

    def _own(self, rows: np.ndarray) -> np.ndarray:
        """This process's rows of a global batch: every n-th, so that all have neighbours in length and end together."""
        return rows[self._world.rank :: self._world.size]

    def _rest_of(self, epoch: int, begin: int) -> Iterator[Work]:
        laid = self._epoch(epoch)
        batches = laid.plan.batches
        made = prefetched(self._make, self._batches(laid, begin))
        for first in range(begin, batches, self._accumulate):
            used = min(first + self._accumulate, batches)
            whole = [next(made) for _ in range(first, used)]
            yield Work(
                batches=[each.own for each in whole if each.own is not None],
                tokens=sum(each.tokens for each in whole),
                rows=[each.rows for each in whole],
                epoch=epoch if used < batches else epoch + 1,
                batch=used if used < batches else 0,
            )

    def _batches(self, laid: "_Epoch", begin: int) -> Iterator["_Rows"]:
        """The global batches of an epoch from `begin` on."""
        # planned and drawn while those before are trained on
        for batches in prefetched(partial(self._part, laid), laid.plan.parts(begin), ahead=1):
            yield from batches

    def _part(self, laid: "_Epoch", begun: tuple[EpochPart, int]) -> list["_Rows"]:
        """The global batches of one part of an epoch, whose pieces are drawn together where any are.

        Rows are sorted by the pieces that were drawn: by those that the data has, a third of each batch were padding.
        Every process draws them all: the batches of each depend on all lengths.
        """
        (part, skipped), side = begun, laid.side
        if self._resegmentation is None:
            return [_Rows(rows, side, rows) for rows in part.planned(side)[skipped:]]
        drawn = self._resegmentation.of(side, part.rows, part.copies, epoch=laid.number)
        places = part.batches(drawn.source.lengths, drawn.target.lengths)
        return [_Rows(part.rows[each], drawn, each) for each in places[skipped:]]

    def _make(self, whole: "_Rows") -> "_Made":
        """This process's part of a global batch."""
        own = self._own(whole.places)
        batch = make_batch(whole.side, own, self._longest) if len(own) else None
        if batch is not None and self._world.device.type == "cuda":
            batch = batch.pinned()
        return _Made(whole.rows, count_tokens(whole.side, [whole.places]), batch)

    def name_lines(self, epoch: int, rows: Sequence[np.ndarray]) -> str:
        """The lines of the input files where these rows of an epoch are, or begin, as "lines 3, 8, 12 of train.en"."""
        side, every = self.side(epoch), np.unique(np.concatenate(rows))
        joined_up = "what begins at " if self._documents is not None and side is not self._side else ""
        corpora = np.zeros(len(every), dtype=np.int64) if side.corpora is None else side.corpora[every]
        named = []
        for corpus in np.unique(corpora):
            numbers = np.sort(side.lines[every[corpora == corpus]])
            lines = f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
            named.append(f"{joined_up}{lines} of {self._source_names[corpus]}")
        return ", ".join(named)


def count_tokens(side: Side, batches: Sequence[np.ndarray]) -> int:
    """Target tokens that batches of these rows predict, the end mark of each segment among them."""
    return sum(int(side.target.lengths[rows].sum()) + len(rows) for rows in batches)
