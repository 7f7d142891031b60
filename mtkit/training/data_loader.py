"""The batches of each update, from a place in the data that is two numbers: an epoch, and a batch of it."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from mtkit.data.augmentation import Augmentation
from mtkit.data.batches import Batch, make_batch, prefetch
from mtkit.data.epochs import EpochPart, EpochPlan, plan_epoch
from mtkit.data.prepared import Prepared, Side
from mtkit.data.resampling import Resegmentation, join_documents, sampling_strength
from mtkit.errors import DataError
from mtkit.recipe import Recipe
from mtkit.text.corpora import name_of
from mtkit.training.world import World

T = TypeVar("T")

SAMPLED_TOGETHER = 1 << 19
"""Pieces per side, about, that subword regularisation samples before their rows are sorted into batches: seconds of
work, and enough rows for batches with hardly any padding. More if batches are large."""


@dataclass(frozen=True)
class UpdateBatches:
    """The batches of one update on this process, and the place in the data after it."""

    batches: list[Batch]
    """This process's part of the update's global batches; a small global batch may leave it none."""
    tokens: int
    """Real target tokens of all processes and batches of the update: its loss is a mean over them."""
    rows: list[np.ndarray]
    """Rows of the epoch's side in each global batch of the update, over all processes."""
    epoch: int
    batch: int
    """The place in the data after this update: `epoch`, and how many of its global batches are used up."""


@dataclass(frozen=True)
class _Epoch:
    """The rows of an epoch and their division into batches."""

    number: int
    side: Side
    plan: EpochPlan


@dataclass(frozen=True)
class _GlobalBatch:
    """A batch over all processes: its rows of the epoch's side, and their places in the side with their pieces."""

    rows: np.ndarray
    side: Side
    places: np.ndarray


def tempered(weights: Sequence[float], segments: Sequence[int], temperature: float) -> list[float]:
    """Return the weights of corpora whose shares of an epoch are proportional to size ^ (1 / temperature).

    The size of a corpus is its weight times its segments. Their sum, the size of an epoch, does not change. The mix of
    languages of multilingual BERT and of Arivazhagan et al. (2019, arXiv 1907.05019).
    """
    sizes = np.multiply(weights, segments)
    used = sizes > 0
    if temperature == 1 or not used.any():
        return list(weights)
    logarithms = np.log(sizes[used]) / temperature
    shares = np.exp(logarithms - logarithms.max())
    result = np.array(weights, dtype=np.float64)
    result[used] *= shares / shares.sum() * sizes.sum() / sizes[used]
    return result.tolist()


class DataLoader:
    """Divides the training side into updates; finds any starting place without going through the data before it."""

    def __init__(self, recipe: Recipe, prepared: Prepared, longest: int, world: World) -> None:
        """`longest` is the maximum number of pieces that the model takes. Raises: DataError without training pairs."""
        self._side, self._documents = prepared.train, prepared.settings.documents
        self._batch_tokens = recipe.training.batch_tokens
        self._accumulate = recipe.training.accumulate
        self._longest = longest
        self._seed = recipe.seed
        self._world = world
        corpora, text = prepared.settings.train, prepared.folder / "text" / "train.en"
        counts = [corpus["segments"] for corpus in prepared.record["sides"]["train"]["corpora"]]
        weights = [corpus.weight for corpus in corpora]
        self._weights = tempered(weights, counts[: len(weights)], recipe.training.corpus_temperature)
        self._source_names = [name_of(corpus, "source") for corpus in corpora] or [str(text)]
        tokenizer = prepared.settings.tokenizer
        strength = sampling_strength(
            tokenizer, dropout=recipe.training.subword_dropout, alpha=recipe.training.subword_alpha
        )
        self._resegmentation = (
            Resegmentation(prepared.tokenizers, tokenizer.kind, strength, longest=longest, seed=recipe.seed)
            if strength
            else None
        )
        self._augmentation = (
            Augmentation(
                prepared.tokenizers,
                capitals=recipe.training.capitals,
                typos=recipe.training.typos,
                longest=longest,
                seed=recipe.seed,
            )
            if recipe.training.capitals or recipe.training.typos
            else None
        )
        self._last: _Epoch | None = None
        self.batches_per_epoch = self._epoch(0).plan.batches
        """Global batches of the first epoch; others may differ slightly."""
        self.updates_per_epoch = -(-self.batches_per_epoch // self._accumulate)
        if not self.batches_per_epoch and self._side.too_long(longest) < len(self._side):
            raise DataError(
                f"the weights of the corpora in {prepared.folder} leave an epoch without a pair; raise the weight in "
                "data.train, and prepare again"
            )
        if not self.batches_per_epoch:
            raise DataError(
                f"no training segment in {prepared.folder} fits the model: all {len(self._side):,} have more "
                f"than {longest} pieces on one side; raise model.max_length"
            )

    def side(self, epoch: int) -> Side:
        """Return the rows of an epoch: the training side, or its documents, joined again for each epoch."""
        return self._epoch(epoch).side

    def plan(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the rows of every global batch of an epoch, as they are without subword sampling."""
        layout = self._epoch(epoch)
        for part, _ in layout.plan.parts():
            yield from part.planned(layout.side)

    @property
    def _samples(self) -> bool:
        """Whether rows get other pieces in each epoch."""
        return self._resegmentation is not None or self._augmentation is not None

    def _epoch(self, number: int) -> _Epoch:
        """Return the layout of an epoch; the last one is cached."""
        if self._last is None or self._last.number != number:
            side = self._side
            if self._documents is not None:
                pieces = min(self._documents.pieces, self._longest - 1)
                side = join_documents(side, pieces, seed=self._seed, epoch=number, whole=self._documents.whole)
            plan = plan_epoch(
                side,
                batch_tokens=self._batch_tokens,
                max_length=self._longest,
                seed=self._seed,
                epoch=number,
                weights=self._weights,
                pieces=max(SAMPLED_TOGETHER, 32 * self._batch_tokens) if self._samples else None,
            )
            self._last = _Epoch(number, side, plan)
        return self._last

    def largest(self) -> list[Batch]:
        """This process's parts of the first epoch's batches that take the most memory: by tokens, and by width."""
        side, plan = self.side(0), self._epoch(0).plan
        most, largest = [(0, 0), (0, 0)], dict[int, np.ndarray]()
        for rows in (rows for window in plan.heaviest for part in plan.draw(window) for rows in part.planned(side)):
            if len(local := self._local(rows)):
                width = 1 + max(int(pieces.lengths[local].max()) for pieces in (side.source, side.target))
                for key, size in enumerate(((len(local) * width, width), (width, len(local) * width))):
                    if size > most[key]:
                        most[key], largest[key] = size, local.copy()
        same = len(largest) == 2 and np.array_equal(largest[0], largest[1])
        return [make_batch(side, rows, self._longest) for rows in list(largest.values())[: 1 if same else 2]]

    def spread(self, count: int) -> list[np.ndarray]:
        """Return rows of up to `count` global batches of the first epoch, of evenly spaced widths, without sampling."""
        layout = self._epoch(0)
        first, _ = next(layout.plan.parts())
        batches = sorted(first.planned(layout.side), key=lambda rows: int(layout.side.target.lengths[rows].max()))
        return evenly_spaced(batches, count)

    def samples(self, count: int) -> list[UpdateBatches]:
        """Updates of one global batch each: one row per process, then up to `count` widths, evenly spaced.

        They come from the first epoch, without subword sampling, and are the same in every process.
        """
        side, chosen = self.side(0), self.spread(count)
        return [
            UpdateBatches(
                batches=[make_batch(side, local, self._longest)] if len(local := self._local(rows)) else [],
                tokens=count_tokens(side, [rows]),
                rows=[rows],
                epoch=0,
                batch=0,
            )
            for rows in (chosen[0][: self._world.size], *chosen)
        ]

    def updates(self, epoch: int, batch: int) -> Generator[UpdateBatches, None, None]:
        """Endless updates from this place on. The last update of an epoch has the remaining batches."""
        while True:
            yield from self._rest_of(epoch, batch)
            epoch, batch = epoch + 1, 0

    def _local(self, rows: np.ndarray) -> np.ndarray:
        """This process's rows of a global batch: every n-th, so that the processes' rows have similar lengths."""
        return rows[self._world.rank :: self._world.size]

    def _rest_of(self, epoch: int, begin: int) -> Iterator[UpdateBatches]:
        layout = self._epoch(epoch)
        batches = layout.plan.batches
        local = prefetch(self._make, self._global_batches(layout, begin))
        for first in range(begin, batches, self._accumulate):
            end = min(first + self._accumulate, batches)
            group = [next(local) for _ in range(first, end)]
            yield UpdateBatches(
                batches=[batch for batch, _, _ in group if batch is not None],
                tokens=sum(tokens for _, tokens, _ in group),
                rows=[rows for _, _, rows in group],
                epoch=epoch if end < batches else epoch + 1,
                batch=end if end < batches else 0,
            )

    def _global_batches(self, layout: _Epoch, begin: int) -> Iterator[_GlobalBatch]:
        """Yield the global batches of an epoch from `begin` on; the next part is planned while one is trained on."""
        for batches in prefetch(partial(self._part, layout), layout.plan.parts(begin), ahead=1):
            yield from batches

    def _part(self, layout: _Epoch, begun: tuple[EpochPart, int]) -> list[_GlobalBatch]:
        """Return the global batches of one part of an epoch, with its pieces sampled together.

        Rows are sorted by their sampled pieces: by the pieces in the data, a third of each batch would be padding.
        Every process samples all of them, because each batch depends on all lengths.
        """
        (part, skipped), side = begun, layout.side
        if not self._samples:
            return [_GlobalBatch(rows, side, rows) for rows in part.planned(side)[skipped:]]
        sampled = self._sampled(side, part, layout.number)
        batches = part.batches(sampled.source.lengths, sampled.target.lengths)
        return [_GlobalBatch(part.rows[places], sampled, places) for places in batches[skipped:]]

    def _sampled(self, side: Side, part: EpochPart, epoch: int) -> Side:
        """Return the rows of a part, with other text, then in other pieces."""
        places = part.rows
        if self._augmentation is not None:
            side, places = self._augmentation.of(side, part.rows, part.copies, epoch=epoch), np.arange(len(part.rows))
        if self._resegmentation is not None:
            side = self._resegmentation.of(side, part.rows, part.copies, epoch=epoch, places=places)
        return side

    def _make(self, global_batch: _GlobalBatch) -> tuple[Batch | None, int, np.ndarray]:
        """This process's part of a global batch, and the target tokens and rows of all of it."""
        places = self._local(global_batch.places)
        batch = make_batch(global_batch.side, places, self._longest) if len(places) else None
        if batch is not None and self._world.device.type == "cuda":
            batch = batch.pin()
        return batch, count_tokens(global_batch.side, [global_batch.places]), global_batch.rows

    def name_lines(self, epoch: int, rows: Sequence[np.ndarray]) -> str:
        """Return the lines of the input files of these rows of an epoch, as "lines 3, 8, 12 of train.en"."""
        side, unique = self.side(epoch), np.unique(np.concatenate(rows))
        prefix = "what begins at " if self._documents is not None and side is not self._side else ""
        corpora = np.zeros(len(unique), dtype=np.int64) if side.corpora is None else side.corpora[unique]
        named = []
        for corpus in np.unique(corpora):
            numbers = np.sort(side.lines[unique[corpora == corpus]])
            lines = f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
            named.append(f"{prefix}{lines} of {self._source_names[corpus]}")
        return ", ".join(named)


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """Return up to `most` items, from the middles of stretches of equal length."""
    count = min(most, len(items))
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]


def count_tokens(side: Side, batches: Sequence[np.ndarray]) -> int:
    """Target tokens that batches of these rows predict, the end mark of each segment included."""
    return sum(int(side.target.lengths[rows].sum()) + len(rows) for rows in batches)
