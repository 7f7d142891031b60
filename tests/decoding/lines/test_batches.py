"""Batches of source segments."""

import torch

from mtkit.decoding.lines.batches import make_batch
from mtkit.decoding.lines.segments import Segment
from mtkit.text.tokenizer import EOS, PAD


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
