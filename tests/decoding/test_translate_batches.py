"""Batches of source segments."""

import torch

from mtkit.decoding.lines.source import Segment
from mtkit.decoding.translate import make_batch, plan
from mtkit.text.tokenizer import EOS, PAD


def test_every_segment_comes_once_and_batches_keep_to_their_size() -> None:
    lengths = [3, 50, 1, 7, 7, 2, 30, 9, 1, 200]
    batches = plan(lengths, batch_tokens=120, hypotheses=2)
    assert sorted(index for batch in batches for index in batch) == list(range(10))
    assert batches[0] == [9]  # alone: it is longer than a batch
    for batch in batches[1:]:
        assert max(lengths[index] for index in batch) * len(batch) * 2 <= 120
    widths = [lengths[index] for batch in batches for index in batch]
    assert widths == sorted(widths, reverse=True)
    assert len(batches) <= 5
    assert plan([], 100, 1) == []


def test_batches_that_are_worked_on_at_once_end_together() -> None:
    lengths = [50] * 90
    assert [len(batch) for batch in plan(lengths, 2000, 1)] == [40, 40, 10]
    assert [len(batch) for batch in plan(lengths, 2000, 1, at_once=2)] == [23, 23, 23, 21]
    assert [len(batch) for batch in plan(lengths, 2000, 1, at_once=3)] == [30, 30, 30]
    assert [len(batch) for batch in plan(lengths, 49, 1, at_once=2)] == [1] * 90  # each is longer than a batch
    assert [len(batch) for batch in plan([50] * 8, 2000, 1, at_once=8)] == [8]  # too few to part
    assert plan([], 100, 1, at_once=2) == []


def test_segments_are_padded_each_with_its_limit() -> None:
    segments = [Segment(0, 0, [5, 6, 7, EOS]), Segment(7, 1, [EOS])]
    batch = make_batch(segments, [28, 22], torch.device("cpu"))
    assert batch.limits == [28, 22]
    assert batch.source.tolist() == [[5, 6, 7, EOS], [EOS, PAD, PAD, PAD]]
    assert batch.valid.tolist() == [[True] * 4, [True, False, False, False]]
    assert len(set(batch.keys.tolist())) == 2
    other = make_batch([Segment(1, 1, [EOS])], [22], torch.device("cpu"), numbers=[3, 7])
    assert other.keys.tolist() == batch.keys.tolist()[1:]


def test_parts_of_a_line_draw_other_numbers_and_the_same_in_any_batch() -> None:
    """Sampling draws by these keys: parts with one key would be sampled alike."""
    parts = [Segment(line, part, [5, EOS]) for line in (0, 1) for part in (0, 1, 2)]
    keys = make_batch(parts, [9] * 6, torch.device("cpu"), numbers=[70, 71]).keys.tolist()
    assert len(set(keys)) == 6
    assert make_batch([parts[4]], [9], torch.device("cpu"), numbers=[70, 71]).keys.tolist() == [keys[4]]
    later = [Segment(0, part, [5, EOS]) for part in (0, 1, 2)]
    assert make_batch(later, [9] * 3, torch.device("cpu"), numbers=[71]).keys.tolist() == keys[3:]
