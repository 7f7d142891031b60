from itertools import islice

import numpy as np
import pytest
import torch

from mtkit.data.batches import make_batch
from mtkit.data.prepared import Prepared
from mtkit.training.distributed import World
from mtkit.training.feed import Feed, to_device
from tests.training.conftest import tiny

CPU = torch.device("cpu")


def feed(prepared: Prepared, *, rank: int = 0, size: int = 1, accumulate: int = 3, batch_tokens: int = 200) -> Feed:
    world = World(CPU)
    world.rank, world.size = rank, size
    recipe = tiny(training={"accumulate": accumulate, "batch_tokens": batch_tokens})
    return Feed(recipe, prepared, 1024, world)


def test_from_any_place_on_the_updates_are_those_of_an_unbroken_feed(prepared: Prepared) -> None:
    whole = list(islice(feed(prepared).updates(0, 0), 30))
    assert whole[-1].epoch >= 1
    for start in (1, 5, 11, 12, 13):
        place = whole[start - 1]
        for ours, theirs in zip(feed(prepared).updates(place.epoch, place.batch), whole[start:], strict=False):
            assert (ours.epoch, ours.batch, ours.tokens) == (theirs.epoch, theirs.batch, theirs.tokens)
            assert all(torch.equal(a.source, b.source) for a, b in zip(ours.batches, theirs.batches, strict=True))


def test_an_epoch_trains_on_every_segment_once(prepared: Prepared) -> None:
    source = feed(prepared)
    epoch = list(islice(source.updates(0, 0), source.updates_per_epoch))
    rows = np.concatenate([each for work in epoch for each in work.rows])
    assert sorted(rows) == list(range(len(prepared.train)))
    assert (epoch[-1].epoch, epoch[-1].batch) == (1, 0)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_each_global_batch_without_overlap(prepared: Prepared, size: int) -> None:
    alone = list(islice(feed(prepared, batch_tokens=40).updates(0, 0), 20))
    shares = [list(islice(feed(prepared, rank=r, size=size, batch_tokens=40).updates(0, 0), 20)) for r in range(size)]
    for number, work in enumerate(alone):
        lines = [line for share in shares for batch in share[number].batches for line in batch.lines]
        assert sorted(lines) == sorted(line for batch in work.batches for line in batch.lines)
        assert all(share[number].tokens == work.tokens for share in shares)
        assert work.tokens == sum(batch.target_tokens for batch in work.batches)
    assert any(len(share[number].batches) < 3 for share in shares for number in range(20)), "some go without a row"


def test_inputs_hold_the_real_target_tokens_and_masks_only_where_there_is_padding(prepared: Prepared) -> None:
    lengths = prepared.train.target.lengths
    ragged = np.array([int(lengths.argmin()), int(lengths.argmax())])
    batch = make_batch(prepared.train, ragged)
    inputs = to_device(batch, CPU)
    assert torch.equal(inputs.target, batch.target_out[batch.target_valid])
    assert torch.equal(batch.target_out.flatten()[inputs.places], inputs.target)
    assert inputs.target_valid is not None
    assert torch.equal(inputs.places // inputs.width, batch.target_valid.nonzero()[:, 0])
    single = to_device(make_batch(prepared.train, ragged[:1]), CPU)
    assert single.source_valid is None
    assert single.target_valid is None
