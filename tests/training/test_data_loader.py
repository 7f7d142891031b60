from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from mtkit.data.batches import make_batch
from mtkit.data.columns import Tokens
from mtkit.data.prepared import Prepared
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus, DocumentSettings
from mtkit.training.data_loader import DataLoader, UpdateBatches, evenly_spaced
from mtkit.training.device_batch import DeviceBatch
from mtkit.training.world import World
from tests.training.conftest import tiny

CPU = torch.device("cpu")


def loader(
    prepared: Prepared,
    *,
    rank: int = 0,
    size: int = 1,
    accumulate: int = 3,
    batch_tokens: int = 200,
    **training: object,
) -> DataLoader:
    world = World("cpu")
    world.rank, world.size = rank, size
    recipe = tiny(training={"accumulate": accumulate, "batch_tokens": batch_tokens, **training})
    return DataLoader(recipe, prepared, 1024, world)


@pytest.fixture(params=["whole", "in windows"])
def planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of one window, and of several."""
    if request.param == "in windows":
        monkeypatch.setattr("mtkit.data.epochs.WINDOW", 60)
        monkeypatch.setattr("mtkit.data.epochs.BLOCK", 8)


@pytest.mark.usefixtures("planned")
def test_from_any_place_on_the_updates_are_those_of_an_unbroken_feed(prepared: Prepared) -> None:
    whole = list(islice(loader(prepared).updates(0, 0), 30))
    assert whole[-1].epoch >= 1
    for start in (1, 5, 11, 12, 13):
        place = whole[start - 1]
        for ours, theirs in zip(loader(prepared).updates(place.epoch, place.batch), whole[start:], strict=False):
            assert (ours.epoch, ours.batch, ours.tokens) == (theirs.epoch, theirs.batch, theirs.tokens)
            assert all(torch.equal(a.source, b.source) for a, b in zip(ours.batches, theirs.batches, strict=True))


@pytest.mark.usefixtures("planned")
def test_an_epoch_trains_on_every_segment_once(prepared: Prepared) -> None:
    source = loader(prepared)
    epoch = list(islice(source.updates(0, 0), source.updates_per_epoch))
    rows = np.concatenate([each for work in epoch for each in work.rows])
    assert sorted(rows) == list(range(len(prepared.train)))
    assert (epoch[-1].epoch, epoch[-1].batch) == (1, 0)


def test_segments_of_documents_are_joined_anew_each_epoch(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = prepared.settings.model_copy(update={"documents": DocumentSettings(pieces=5_000)})
    assert loader(replace(prepared, settings=settings)).side(1) is prepared.train  # its segments are no documents
    train = replace(prepared.train, documents=np.zeros(len(prepared.train), dtype=np.int64))
    monkeypatch.setattr(Tokens, "adjoining", property(lambda tokens: np.ones(len(tokens) - 1, dtype=bool)))
    source = loader(replace(prepared, settings=settings, train=train))
    lines = [source.side(epoch).lines.tolist() for epoch in (0, 1, 0)]
    longest = max(int(source.side(epoch).source.lengths.max()) for epoch in range(9))
    taken = [line for work in islice(source.updates(1, 0), 3) for each in work.batches for line in each.lines]
    assert lines[0] == lines[2] != lines[1]
    assert 500 < longest < 1_024  # what the model takes
    assert set(taken) <= set(lines[1])
    assert source.name_lines(1, [np.array([0])]) == f"what begins at line 1 of {prepared.folder}/text/train.en"


@pytest.mark.parametrize("together", [1 << 19, 700])
def test_drawn_pieces_are_those_of_an_unbroken_feed_and_other_ones_each_epoch(
    prepared: Prepared, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.training.data_loader.SAMPLED_TOGETHER", together)
    source = loader(prepared, subword_dropout=0.2)
    whole = list(islice(source.updates(0, 0), source.updates_per_epoch + 5))
    place = whole[source.updates_per_epoch - 4]
    again = list(islice(loader(prepared, subword_dropout=0.2).updates(place.epoch, place.batch), 8))
    for ours, theirs in zip(again, whole[source.updates_per_epoch - 3 :], strict=True):
        assert (ours.epoch, ours.batch, ours.tokens) == (theirs.epoch, theirs.batch, theirs.tokens)
        assert all(torch.equal(a.source, b.source) for a, b in zip(ours.batches, theirs.batches, strict=True))
    assert all(work.tokens == sum(batch.target_tokens for batch in work.batches) for work in whole)


def test_processes_draw_the_same_pieces_as_one(prepared: Prepared) -> None:
    alone = list(islice(loader(prepared, subword_dropout=0.3).updates(0, 0), 6))
    shares = [list(islice(loader(prepared, rank=r, size=2, subword_dropout=0.3).updates(0, 0), 6)) for r in range(2)]

    def targets(works: list[UpdateBatches], number: int) -> list[tuple[int, list[int]]]:
        return [
            (int(line), tokens[valid].tolist())
            for batch in works[number].batches
            for line, tokens, valid in zip(batch.lines, batch.target_out, batch.target_valid, strict=True)
        ]

    for number, work in enumerate(alone):
        assert sorted(targets(alone, number)) == sorted(targets(shares[0], number) + targets(shares[1], number))
        assert all(share[number].tokens == work.tokens for share in shares)


def test_the_largest_batches_are_those_with_most_tokens_and_with_the_widest_rows(prepared: Prepared) -> None:
    source = loader(prepared)
    sizes = [batch.size for work in islice(source.updates(0, 0), source.updates_per_epoch) for batch in work.batches]
    largest = source.largest()
    assert max(batch.size for batch in largest) == max(sizes)
    lengths = np.maximum(prepared.train.source.lengths, prepared.train.target.lengths)
    assert max(max(batch.source.shape[1], batch.target_in.shape[1]) for batch in largest) == lengths.max() + 1


def test_drawn_pieces_are_sorted_into_batches_by_their_own_lengths(prepared: Prepared) -> None:
    drawn, plain = loader(prepared, subword_dropout=0.3), loader(prepared)
    assert drawn.updates_per_epoch == plain.updates_per_epoch
    shares = []
    for source in (drawn, plain):
        batches = [each for work in islice(source.updates(0, 0), source.updates_per_epoch) for each in work.batches]
        lines = np.concatenate([batch.lines for batch in batches])
        assert np.array_equal(np.sort(lines), np.sort(prepared.train.lines))
        valid = [mask for batch in batches for mask in (batch.source_valid, batch.target_valid)]
        shares.append(1 - sum(int(mask.sum()) for mask in valid) / sum(mask.numel() for mask in valid))
    # by the lengths that the data has, padding would be three times as much as without drawing, and more
    assert shares[0] < 1.5 * shares[1]


def test_lines_are_named_with_the_corpus_that_they_are_of(prepared: Prepared) -> None:
    source = loader(prepared)
    assert source.name_lines(0, [np.array([4]), np.array([1])]) == f"lines 2, 5 of {prepared.folder}/text/train.en"
    corpora = np.zeros(len(prepared.train), dtype=np.int16)
    corpora[4:] = 1
    source._last = replace(source._epoch(0), side=replace(prepared.train, corpora=corpora))
    source._source_names = ["a.en", "b.en"]
    assert source.name_lines(0, [np.array([4, 7]), np.array([1])]) == "line 2 of a.en, lines 5, 8 of b.en"


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_each_global_batch_without_overlap(prepared: Prepared, size: int) -> None:
    alone = list(islice(loader(prepared, batch_tokens=40).updates(0, 0), 20))
    shares = [list(islice(loader(prepared, rank=r, size=size, batch_tokens=40).updates(0, 0), 20)) for r in range(size)]
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
    inputs = DeviceBatch.of(batch, CPU)
    assert torch.equal(inputs.target, batch.target_out[batch.target_valid])
    assert torch.equal(batch.target_out.flatten()[inputs.places], inputs.target)
    assert inputs.target_valid is not None
    assert torch.equal(inputs.places // inputs.width, batch.target_valid.nonzero()[:, 0])
    assert inputs.source_lengths is not None
    assert inputs.source_lengths.tolist() == (prepared.train.source.lengths[ragged] + 1).tolist()
    single = DeviceBatch.of(make_batch(prepared.train, ragged[:1]), CPU)
    assert single.source_valid is None
    assert single.source_lengths is None
    assert single.target_valid is None


def test_weights_that_leave_no_pair_are_said(prepared: Prepared) -> None:
    little = [Corpus(source=Path("a.en"), target=Path("a.de"), weight=1e-6)]
    settings = prepared.settings.model_copy(update={"train": little})
    with pytest.raises(DataError, match=r"the weights of the corpora in .* leave an epoch without a pair"):
        loader(replace(prepared, settings=settings))


@pytest.mark.parametrize("strength", [{}, {"subword_dropout": 0.3}])
def test_other_text_is_the_same_after_a_resume_and_on_several_processes(
    prepared: Prepared, strength: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.training.data_loader.SAMPLED_TOGETHER", 700)
    how = {"capitals": 0.3, "typos": 0.3, **strength}

    def rows(source: DataLoader, epoch: int, batch: int, count: int) -> list[list[tuple[int, list[int], list[int]]]]:
        return [
            sorted(
                (int(line), one[valid].tolist(), other.tolist())
                for part in work.batches
                for line, one, valid, other in zip(
                    part.lines, part.source, part.source_valid, part.target_out, strict=True
                )
            )
            for work in islice(source.updates(epoch, batch), count)
        ]

    def unpadded(updates: list[list[tuple[int, list[int], list[int]]]]) -> list[list[tuple[int, list[int]]]]:
        return [[(line, one) for line, one, _ in update] for update in updates]

    alone = loader(prepared, **how)
    per_epoch = alone.updates_per_epoch
    whole = rows(alone, 0, 0, per_epoch + 4)
    place = list(islice(alone.updates(0, 0), per_epoch - 2))[-1]
    assert rows(loader(prepared, **how), place.epoch, place.batch, 6) == whole[per_epoch - 2 : per_epoch + 4]
    shares = [unpadded(rows(loader(prepared, rank=r, size=2, **how), 0, 0, 5)) for r in range(2)]
    assert [sorted(one + other) for one, other in zip(*shares, strict=True)] == unpadded(whole)[:5]
    plain = rows(loader(prepared, **strength), 0, 0, per_epoch)
    assert sorted(line for work in plain for line, *_ in work) == sorted(
        line for work in whole[:per_epoch] for line, *_ in work
    )
    tokenizer, text = prepared.tokenizers.target, dict[int, str]()
    for line, row in zip(prepared.train.lines[:].tolist(), range(len(prepared.train)), strict=True):
        text[line] = tokenizer.decode(prepared.train.target[row].tolist())
    drawn = [(line, tokenizer.decode(pieces)) for work in whole[:per_epoch] for line, _, pieces in work]
    assert all(found in (text[line], text[line].upper()) for line, found in drawn)
    assert 0 < sum(found != text[line] for line, found in drawn) < len(drawn)


def test_items_are_evenly_spaced() -> None:
    assert evenly_spaced([3, 1, 2], 24) == [3, 1, 2]
    chosen = evenly_spaced(range(2_400), 24)
    assert len(chosen) == 24
    assert {b - a for a, b in pairwise(chosen)} == {100}
