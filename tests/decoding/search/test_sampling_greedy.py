"""Greedy decoding and what all unbranched decoding shares."""

import torch

from mtkit.decoding.search.sampling import greedy_search
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BOS, EOS
from tests.decoding.tiny import TinyModel, batch_of, log_prob_of, random_sources

GREEDY = DecodingSettings(method="greedy")


def by_hand(model: TinyModel, source: list[int], limit: int) -> list[int]:
    """Step by step, alone."""
    batch, pieces = batch_of([source], limit), [BOS]
    state = model.start(model.encode(batch.source, batch.valid))
    while pieces[-1] != EOS:
        logits, state, _ = model.step(torch.tensor([[pieces[-1]]]), state)
        pieces.append(EOS if len(pieces) == limit else EOS + int(logits.whole()[0, 0, EOS:].argmax()))
    return pieces[1:]


def test_each_segment_takes_the_likeliest_pieces_up_to_its_own_limit() -> None:
    model, sources = TinyModel(sharpness=3.0), random_sources(30)
    limits = [1 + number % 7 for number in range(30)]
    with torch.no_grad():
        found = greedy_search(model, batch_of(sources, limits), GREEDY)
        expected = [by_hand(model, source, limit) for source, limit in zip(sources, limits, strict=True)]
    for row, pieces in enumerate(expected):
        assert found.pieces[row, 0, : found.lengths[row, 0]].tolist() == pieces
        assert abs(found.log_probs[row, 0].item() - log_prob_of(model, sources[row], pieces)) < 1e-4
        assert abs(found.scores[row, 0].item() - found.log_probs[row, 0].item() / len(pieces)) < 1e-6
    assert len(model.steps) > 0


def test_finished_segments_leave_the_batch() -> None:
    model = TinyModel()
    with torch.no_grad():
        greedy_search(model, batch_of([[4, 5]] * 20, [1] * 10 + [2] * 9 + [12]), GREEDY)
    assert model.steps[0] == 20
    assert model.steps[-1] == 1


def test_no_sequence_comes_twice_where_that_is_forbidden() -> None:
    model, sources = TinyModel(sharpness=5.0), random_sources(20)
    with torch.no_grad():
        found = greedy_search(model, batch_of(sources, 10), GREEDY.model_copy(update={"no_repeat_ngram": 1}))
    for pieces, length in zip(found.pieces[:, 0], found.lengths[:, 0].tolist(), strict=True):
        assert len(set(pieces[:length].tolist())) == length


def test_a_model_that_gives_no_numbers_ends_the_segment() -> None:
    model = TinyModel()
    with torch.no_grad():
        model.source[4] = torch.nan
        found = greedy_search(model, batch_of([[4, 5], [5, 6]], 6), GREEDY)
    assert found.pieces[0, 0, 0] == EOS
    assert found.log_probs[0, 0] == -torch.inf
    assert found.log_probs[1, 0].isfinite()
