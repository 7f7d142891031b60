"""Greedy search and sampling: the right pieces with the right frequencies, the same ones in any batch."""

import torch

from mtkit.decoding.search.sampling import draw, greedy_search, sample, uniform
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


def test_numbers_are_uniform_and_independent() -> None:
    drawn = uniform(1, torch.arange(2000), 20, 3)
    assert drawn.shape == (2000, 20)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    shares = torch.histc(drawn.flatten(), 20, 0, 1) / drawn.numel()
    assert (shares - 0.05).abs().max() < 0.005
    correlation = torch.corrcoef(drawn.T) - torch.eye(20)
    assert correlation.abs().max() < 0.1
    assert drawn.unique().numel() == drawn.numel()
    of_steps = torch.cat([uniform(1, torch.arange(50), 20, step) for step in range(20)])
    assert of_steps.unique().numel() == of_steps.numel()


def test_each_argument_matters_and_the_batch_does_not() -> None:
    keys = torch.tensor([5, 9, 2**40])
    drawn = uniform(1, keys, 4, 0)
    assert torch.equal(uniform(1, keys[1:2], 2, 0), drawn[1:2, :2])
    for other in (uniform(2, keys, 4, 0), uniform(1, keys + 1, 4, 0), uniform(1, keys, 4, 1)):
        assert not (other == drawn).any()
    assert uniform(-(2**70), keys, 4, 0).shape == (3, 4)


PROBABILITIES = torch.tensor([0.4, 0.05, 0.25, 0.1, 0.15, 0.05])
DRAWS = 20_000


def frequencies(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, epsilon: float = 0.0) -> torch.Tensor:
    uniforms = (torch.arange(DRAWS).double() + 0.5) / DRAWS
    logits = PROBABILITIES.log().expand(DRAWS, -1)
    drawn = draw(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p, epsilon=epsilon)
    return torch.bincount(drawn, minlength=len(PROBABILITIES)) / DRAWS


def close(found: torch.Tensor, weights: torch.Tensor) -> None:
    torch.testing.assert_close(found, (weights / weights.sum()).float(), atol=2e-4, rtol=0)


def test_pieces_come_as_often_as_the_model_says() -> None:
    close(frequencies(), PROBABILITIES)


def test_temperature_sharpens_and_flattens() -> None:
    close(frequencies(temperature=0.5), PROBABILITIES**2)
    close(frequencies(temperature=2.0), PROBABILITIES**0.5)
    assert frequencies(temperature=1e-6)[0] == 1


def test_top_k_leaves_the_k_likeliest() -> None:
    close(frequencies(top_k=3), PROBABILITIES * torch.tensor([1, 0, 1, 0, 1, 0]))
    close(frequencies(top_k=5), PROBABILITIES * torch.tensor([1, 1, 1, 1, 1, 0]))  # of equal ones the first


def test_top_p_leaves_the_fewest_that_reach_p() -> None:
    close(frequencies(top_p=0.6), PROBABILITIES * torch.tensor([1, 0, 1, 0, 0, 0]))
    close(frequencies(top_p=0.7), PROBABILITIES * torch.tensor([1, 0, 1, 0, 1, 0]))
    assert frequencies(top_p=1e-9)[0] == 1


def test_top_p_counts_among_the_top_k() -> None:
    close(frequencies(top_k=3, top_p=0.8), PROBABILITIES * torch.tensor([1, 0, 1, 0, 0, 0]))


def test_epsilon_leaves_the_pieces_with_that_probability() -> None:
    close(frequencies(epsilon=0.12), PROBABILITIES * torch.tensor([1, 0, 1, 0, 1, 0]))
    close(frequencies(epsilon=0.02), PROBABILITIES)
    assert frequencies(epsilon=0.9)[0] == 1  # the likeliest is left, as in Hewitt et al. (2022), equation 7
    # the temperature comes first: 0.25 becomes 0.263 of all, 0.15 becomes 0.095
    close(frequencies(epsilon=0.2, temperature=0.5), PROBABILITIES**2 * torch.tensor([1, 0, 1, 0, 0, 0]))


def test_epsilon_counts_among_the_others() -> None:
    # of 0.4, 0.25 and 0.15, the last has 0.1875
    close(frequencies(top_k=3, epsilon=0.18), PROBABILITIES * torch.tensor([1, 0, 1, 0, 1, 0]))
    close(frequencies(top_k=3, epsilon=0.19), PROBABILITIES * torch.tensor([1, 0, 1, 0, 0, 0]))
    close(frequencies(top_p=0.7, epsilon=0.18), PROBABILITIES * torch.tensor([1, 0, 1, 0, 1, 0]))
    close(frequencies(top_p=0.7, epsilon=0.19), PROBABILITIES * torch.tensor([1, 0, 1, 0, 0, 0]))


def test_what_is_forbidden_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    drawn = draw(logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert drawn.tolist() == [1, 3, 3]


def test_a_line_gets_the_same_draws_in_any_batch_and_others_with_another_seed() -> None:
    model, sources = TinyModel(sharpness=1.0), random_sources(15)
    settings = DecodingSettings(method="sample", n_best=4, seed=7)
    with torch.no_grad():
        together = sample(model, batch_of(sources, 9), settings)
        other = sample(model, batch_of(sources, 9), settings.model_copy(update={"seed": 8}))
        for row, source in enumerate(sources):
            alone = sample(model, batch_of([source], 9, keys=[row]), settings)
            length = alone.pieces.shape[2]
            assert torch.equal(alone.pieces[0], together.pieces[row, :, :length])
            torch.testing.assert_close(alone.scores[0], together.scores[row], atol=1e-5, rtol=0)
    assert not torch.equal(other.pieces, together.pieces)
    assert len({tuple(each) for each in together.pieces.flatten(0, 1).tolist()}) > 20


def test_scores_are_the_models_whatever_was_cut_off() -> None:
    model, source = TinyModel(sharpness=1.0), [4, 5, 6]
    settings = DecodingSettings(method="sample", n_best=6, temperature=2.0, top_k=3, length_penalty=0.0)
    with torch.no_grad():
        found = sample(model, batch_of([source], 8), settings)
    assert found.scores[0].tolist() == sorted(found.scores[0].tolist(), reverse=True)
    for pieces, length, score in zip(found.pieces[0], found.lengths[0].tolist(), found.scores[0].tolist(), strict=True):
        ids = pieces[:length].tolist()
        assert ids[-1] == EOS
        assert abs(score - log_prob_of(model, source, ids)) < 1e-4


def test_translations_are_drawn_as_often_as_the_model_finds_them_likely() -> None:
    """Whole sequences: with two pieces at most there are few, and 4,000 draws tell their probabilities."""
    model, source, count = TinyModel(vocabulary=6, sharpness=1.0), [4, 5], 4000
    settings = DecodingSettings(method="sample").model_copy(update={"n_best": count})  # more than a recipe may ask for
    with torch.no_grad():
        found = sample(model, batch_of([source], 3), settings)
    drawn = [tuple(each) for each in found.pieces[0].tolist()]
    allowed = {  # BOS, PAD and UNK are never drawn, so what the others have is shared out among them
        "end": log_prob_of(model, source, [EOS]),
        **{piece: log_prob_of(model, source, [piece]) for piece in (4, 5)},
    }
    total = sum(torch.tensor(each).exp().item() for each in allowed.values())
    for first, log_prob in allowed.items():
        share = sum(each[0] == (EOS if first == "end" else first) for each in drawn) / count
        assert abs(share - torch.tensor(log_prob).exp().item() / total) < 0.03
