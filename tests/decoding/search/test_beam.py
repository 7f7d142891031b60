"""Beam search: against exhaustive search, greedy search and forced decoding, whatever else is in the batch."""

import math
from itertools import pairwise, product

import pytest
import torch

from mtkit.decoding.contract import Hypotheses
from mtkit.decoding.search.beam import beam_search
from mtkit.decoding.search.sampling import greedy_search
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import EOS
from tests.decoding.tiny import FIRST_WORD, TinyModel, batch_of, log_prob_of, random_sources


def search(model: TinyModel, sources: list[list[int]], limits: list[int] | int, **settings: object) -> Hypotheses:
    with torch.no_grad():
        return beam_search(model, batch_of(sources, limits), DecodingSettings.model_validate(settings))


def texts(found: Hypotheses, row: int) -> list[list[int]]:
    """The hypotheses of a segment, without padding."""
    return [
        pieces[:length].tolist()
        for pieces, length in zip(found.pieces[row], found.lengths[row].tolist(), strict=True)
        if length
    ]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_beam_that_holds_everything_finds_what_exhaustive_search_finds(alpha: float) -> None:
    vocabulary, limit = 7, 4  # three words
    model = TinyModel(vocabulary)
    sources = [[4, 5, 6], [6]]
    words = range(FIRST_WORD, vocabulary)
    everything = [[*each, EOS] for length in range(limit) for each in product(words, repeat=length)]
    found = search(model, sources, limit, beam=4**limit, length_penalty=alpha)
    for row, source in enumerate(sources):
        scores = {tuple(each): log_prob_of(model, source, each) / len(each) ** alpha for each in everything}
        expected = sorted(scores, key=lambda each: -scores[each])
        assert [tuple(each) for each in texts(found, row)] == expected
        torch.testing.assert_close(
            found.scores[row, : len(expected)].double(),
            torch.tensor([scores[each] for each in expected], dtype=torch.float64),
            atol=1e-5,
            rtol=0,
        )


def test_beam_one_is_greedy() -> None:
    model, sources = TinyModel(), random_sources(20)
    batch = batch_of(sources, 12)
    with torch.no_grad():
        one = beam_search(model, batch, DecodingSettings(beam=1))
        greedy = greedy_search(model, batch, DecodingSettings(method="greedy"))
    assert torch.equal(one.pieces, greedy.pieces)
    torch.testing.assert_close(one.scores, greedy.scores)
    assert len({tuple(each) for each in greedy.pieces[:, 0].tolist()}) > 5


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0])
def test_log_probabilities_are_those_of_forced_decoding(sharpness: float) -> None:
    model, sources = TinyModel(sharpness=sharpness), random_sources(12)
    limits = [2 + len(source) for source in sources]
    found = search(model, sources, limits, beam=4)
    for row, source in enumerate(sources):
        hypotheses = texts(found, row)
        assert len(hypotheses) == len({tuple(each) for each in hypotheses}) == 4
        for hypothesis, log_prob in zip(hypotheses, found.log_probs[row].tolist(), strict=True):
            assert hypothesis[-1] == EOS
            assert len(hypothesis) <= limits[row]
            assert min(hypothesis) >= EOS
            assert log_prob == pytest.approx(log_prob_of(model, source, hypothesis), abs=1e-4)


def by_the_rules(model: TinyModel, source: list[int], limit: int, beam: int) -> list[list[int]]:
    """The rules of the module written literally, for one segment."""
    alive, ended = [list[int]()], list[list[int]]()
    for step in range(limit):
        words = [EOS] if step + 1 == limit else range(EOS, len(model.weight))
        found = [[*prefix, word] for prefix in alive for word in words]
        score = {tuple(each): log_prob_of(model, source, each) for each in found}
        found = sorted(found, key=lambda each: -score[tuple(each)])[: 2 * beam]
        ended += [each for each in found[:beam] if each[-1] == EOS]
        if len(ended) >= beam:
            break
        alive = [each for each in found if each[-1] != EOS][:beam]
    return sorted(ended, key=lambda each: -log_prob_of(model, source, each) / len(each))[:beam]


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_the_best_of_all_that_ended_are_kept(sharpness: float) -> None:
    """More than there is room for may end at the last step."""
    model, sources = TinyModel(sharpness=sharpness), random_sources(10, longest=4)
    found = search(model, sources, 7, beam=3)
    for row, source in enumerate(sources):
        assert texts(found, row) == by_the_rules(model, source, 7, 3)


@pytest.mark.parametrize("coverage", [0.0, 0.3])
def test_a_segment_gets_the_same_alone_and_in_any_batch(coverage: float) -> None:
    model, sources = TinyModel(sharpness=4.0), random_sources(25)
    limits = [3 + len(source) for source in sources]
    together = search(model, sources, limits, beam=3, coverage_penalty=coverage)
    for row, source in enumerate(sources):
        alone = search(model, [source], limits[row], beam=3, coverage_penalty=coverage)
        assert texts(alone, 0) == texts(together, row)
        torch.testing.assert_close(alone.scores[0], together.scores[row], atol=1e-5, rtol=0)


def test_finished_segments_leave_the_batch() -> None:
    model = TinyModel(sharpness=4.0)
    search(model, random_sources(25), [2, 4, 6, 8, 10] * 5, beam=3)
    assert model.steps[0] == 25
    assert model.steps[-1] <= 10
    assert sum(model.steps) < 25 * len(model.steps) * 0.8


def test_ended_hypotheses_make_room_for_others() -> None:
    """With 2 * beam candidates the beam stays as wide: a sure early end does not keep a better one from being found."""
    model, sources = TinyModel(sharpness=1.0), random_sources(12)
    for row in range(len(sources)):
        found = search(model, [sources[row]], 8, beam=5, n_best=5)
        assert len(texts(found, 0)) == 5


def test_length_penalty_prefers_longer_ones() -> None:
    model, sources = TinyModel(sharpness=1.0), random_sources(12)
    short = search(model, sources, 8, beam=5, length_penalty=0.0).lengths[:, 0].sum()
    long = search(model, sources, 8, beam=5, length_penalty=2.0).lengths[:, 0].sum()
    assert long > short


def test_no_sequence_comes_twice_where_that_is_forbidden() -> None:
    model, sources = TinyModel(sharpness=6.0), random_sources(12)
    free, strict = search(model, sources, 20, beam=3), search(model, sources, 20, beam=3, no_repeat_ngram=2)

    def repeats(found: Hypotheses) -> int:
        pairs = [list(pairwise(each)) for row in range(12) for each in texts(found, row)]
        return sum(len(each) - len(set(each)) for each in pairs)

    assert repeats(free) > 0
    assert repeats(strict) == 0


def test_coverage_is_that_of_the_attention_on_the_way() -> None:
    """The penalty of each hypothesis from the weights of its own path, summed by hand."""
    model, source, beta = TinyModel(), [4, 5, 6, 7], 0.7
    found = search(model, [source, [5]], 6, beam=4, coverage_penalty=beta, length_penalty=0.6)
    for hypothesis, log_prob, score in zip(
        texts(found, 0), found.log_probs[0].tolist(), found.scores[0].tolist(), strict=True
    ):
        batch = batch_of([source], 6)
        state = model.start(model.encode(batch.source, batch.valid))
        total = torch.zeros(len(source) + 1)
        for piece in [2, *hypothesis[:-1]]:
            _, state, weights = model.step(torch.tensor([[piece]]), state, need_weights=True)
            assert weights is not None
            total += weights[0, 0].detach()
        penalty = beta * sum(math.log(min(float(each), 1.0)) for each in total)
        assert score == pytest.approx(log_prob / len(hypothesis) ** 0.6 + penalty, abs=1e-4)


def test_a_model_that_gives_no_numbers_ends_without_hypotheses() -> None:
    model = TinyModel()
    with torch.no_grad():
        model.source[4] = torch.nan
    found = search(model, [[4, 5], [5, 6]], 6, beam=3)
    assert found.log_probs[0].eq(-torch.inf).all()
    assert found.log_probs[1].isfinite().all()
    assert texts(found, 1) == texts(search(model, [[5, 6]], 6, beam=3), 0)
