"""Joint translations of several lines get as many lines, by every search, and the best one that is allowed."""

from itertools import product
from typing import Any

import pytest
import torch

from mtkit.decoding.contract import Hypotheses, SourceBatch
from mtkit.decoding.engines.model_engine import SEARCHES
from mtkit.decoding.search.continuations import allowed_log_probs, best_continuations
from mtkit.decoding.search.endings import ANY, NEITHER, Endings
from mtkit.model.network import Logits
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BREAK, EOS, PAD
from tests.decoding.tiny import TinyModel, batch_of, log_prob_of, random_sources


def joint(lines: list[int], limits: list[int], most: int = 99) -> SourceBatch:
    """A batch of random sources whose translations have these numbers of lines, of `most` pieces each."""
    batch = batch_of(random_sources(len(lines), seed=3), limits)
    return SourceBatch(batch.source, batch.limits, batch.keys, lines=[[most] * count for count in lines])


@torch.inference_mode()
def found_by(given: dict[str, Any], batch: SourceBatch, vocabulary: int = 9) -> Hypotheses:
    """The hypotheses of a search with these settings."""
    settings = DecodingSettings.model_validate(given)
    return SEARCHES[settings.method](TinyModel(vocabulary=vocabulary), batch, settings)


def sizes(pieces: list[int]) -> list[int]:
    """The number of pieces in each line of a hypothesis."""
    assert EOS not in pieces[: pieces.index(EOS)]
    found = [0]
    for piece in pieces[: pieces.index(EOS)]:
        found = [*found, 0] if piece == BREAK else [*found[:-1], found[-1] + 1]
    return found


@pytest.mark.parametrize("most", [4, 99])
@pytest.mark.parametrize(
    "given",
    [
        {"method": "greedy"},
        {"beam": 1},
        {"beam": 4},
        {"method": "sample", "n_best": 3},
        {"beam": 3, "no_repeat_ngram": 1},
    ],
)
def test_a_translation_has_the_lines_of_its_source_and_none_is_empty(given: dict[str, Any], most: int) -> None:
    lines, limits = [1, 2, 5, 3, 1, 4], [6, 12, 12, 7, 9, 30]
    found = found_by({"method": "beam", **given}, joint(lines, limits, most))
    for row, count, limit in zip(found.pieces.tolist(), lines, limits, strict=True):
        for pieces in row:
            each = sizes(pieces)
            assert len(each) == count
            assert count == 1 or min(each) > 0
            assert pieces.index(EOS) < limit
            assert count == 1 or max(each) < most


def test_without_a_number_of_lines_breaks_are_pieces_like_others() -> None:
    batch = joint([1] * 30, [12] * 30)
    free = SourceBatch(batch.source, batch.limits, batch.keys)
    assert (found_by({"method": "greedy"}, free).pieces == BREAK).any()
    assert not (found_by({"method": "greedy"}, batch).pieces == BREAK).any()


@pytest.mark.parametrize("most", [2, 3, 9])
def test_a_wide_beam_finds_the_best_of_all_that_is_allowed(most: int) -> None:
    model = TinyModel(vocabulary=7)
    sources, limit = random_sources(3, seed=5, vocabulary=7), 6
    batch = batch_of(sources, limit)
    limits = [[most, 9], [9, most, 9], [9]]
    counted = SourceBatch(batch.source, batch.limits, batch.keys, lines=limits)
    found = found_by({"method": "beam", "beam": 400, "length_penalty": 0.0}, counted, vocabulary=7)
    for source, of_lines, row, log_prob in zip(sources, limits, found.pieces, found.log_probs, strict=True):
        best, best_pieces = -float("inf"), [0]
        for length in range(limit):
            for inner in product(range(BREAK, 7), repeat=length):
                pieces = [*inner, EOS]
                each = sizes(pieces)
                if len(each) != len(of_lines) or (len(each) > 1 and min(each) == 0):
                    continue
                if any(size >= most for size, most in zip(each, of_lines, strict=True)):
                    continue
                if (score := log_prob_of(model, source, pieces)) > best:
                    best, best_pieces = score, pieces
        assert [piece for piece in row[0].tolist() if piece != PAD] == best_pieces
        assert log_prob[0].item() == pytest.approx(best, abs=1e-4)


def test_a_limit_below_the_number_of_lines_ends_the_translation() -> None:
    found = found_by({"method": "greedy"}, joint([5], [3]))
    assert found.pieces[0, 0].tolist() == [BREAK, BREAK, EOS]


def test_doubts_are_of_the_likelier_ending_in_the_compiled_loop_and_in_the_operations() -> None:
    torch.manual_seed(5)
    logits, before = torch.randn(40, 3, 11), torch.randn(40, 3)
    piece = torch.tensor([EOS, BREAK])[torch.randint(2, (40, 3))]
    wanted = torch.where(piece == EOS, logits[..., BREAK] > logits[..., EOS], logits[..., EOS] > logits[..., BREAK])
    for forbid in (None, lambda log_probs: None):
        endings = Endings(piece, None, torch.zeros(40, 3, dtype=torch.bool))
        best_continuations(Logits.known(logits.clone()), before, 6, endings, forbid)
        assert torch.equal(endings.doubt, wanted)


@pytest.mark.parametrize("given", [{"method": "greedy"}, {"method": "beam", "beam": 3}])
def test_a_hypothesis_is_astray_if_the_model_would_have_ended_a_line_otherwise(given: dict[str, Any]) -> None:
    model, batch = TinyModel(vocabulary=9), joint([3] * 40, [14] * 40)
    found = found_by(given, batch)
    assert found.astray is not None
    assert found.astray.any()
    assert not found.astray.all()
    for source, row, lost in zip(batch.source.tolist(), found.pieces.tolist(), found.astray.tolist(), strict=True):
        words = [piece for piece in source if piece not in (PAD, EOS)]
        for pieces, astray in zip(row, lost, strict=True):
            real = [piece for piece in pieces if piece != PAD]
            ends = [place for place, piece in enumerate(real) if piece in (EOS, BREAK)]
            swapped = [
                log_prob_of(model, words, [*real[:place], EOS if real[place] == BREAK else BREAK])
                > log_prob_of(model, words, real[: place + 1])
                for place in ends
            ]
            assert astray == any(swapped)


def test_the_compiled_loop_and_the_operations_forbid_the_same() -> None:
    torch.manual_seed(4)
    logits, before = torch.randn(40, 3, 11), torch.randn(40, 3)
    piece = torch.tensor([EOS, BREAK, NEITHER, ANY])[torch.randint(4, (40, 3))]
    must = (torch.rand(40, 3) < 0.5) & (piece != NEITHER)
    for endings in (Endings(piece, must), Endings(piece, None), Endings(None, must), Endings(None, None)):
        top, hypothesis, chosen = best_continuations(Logits.known(logits.clone()), before, 6, endings)
        sums = (allowed_log_probs(Logits.known(logits.clone()), endings) + before[..., None]).flatten(1)
        wanted = sums.topk(6)
        real = wanted.values > -torch.inf
        torch.testing.assert_close(top, wanted.values)
        assert torch.equal((hypothesis * 11 + chosen)[real], wanted.indices[real])


@pytest.mark.parametrize(
    "given", [{"method": "greedy"}, {"method": "beam", "beam": 3}, {"method": "sample", "n_best": 2}]
)
def test_a_given_beginning_is_kept_and_the_rest_is_what_follows_it(given: dict[str, Any]) -> None:
    model, prefixes = TinyModel(vocabulary=9), [(7, 5, BREAK), (), (8, BREAK, 6, 6, BREAK)]
    batch = joint([3, 2, 3], [14, 12, 15])
    counted = SourceBatch(batch.source, batch.limits, batch.keys, lines=batch.lines, prefixes=prefixes)
    found = found_by(given, counted)
    for source, row, prefix, log_probs in zip(
        batch.source, found.pieces.tolist(), prefixes, found.log_probs, strict=True
    ):
        for pieces, log_prob in zip(row, log_probs.tolist(), strict=True):
            assert tuple(pieces[: len(prefix)]) == prefix
            assert len(sizes(pieces)) == (2 if not prefix else 3)
            real = [piece for piece in pieces if piece != PAD]
            words = [piece for piece in source.tolist() if piece not in (PAD, EOS)]
            assert log_prob == pytest.approx(log_prob_of(model, words, real), abs=1e-3)
    free = found_by(given, SourceBatch(batch.source[1:2], [12], batch.keys[1:2], lines=[[99, 99]]))
    assert [piece for piece in found.pieces[1, 0].tolist() if piece != PAD] == [
        piece for piece in free.pieces[0, 0].tolist() if piece != PAD
    ]


@pytest.mark.parametrize(
    "given", [{"method": "greedy"}, {"method": "beam", "beam": 3}, {"method": "sample", "n_best": 2}]
)
def test_breaks_of_a_given_beginning_raise_no_doubt(given: dict[str, Any]) -> None:
    model, batch, prefix = TinyModel(vocabulary=9), joint([2] * 40, [14] * 40), (6, 5, BREAK)
    batch = SourceBatch(batch.source, batch.limits, batch.keys, lines=batch.lines, prefixes=[prefix] * 40)
    found, would_end = found_by(given, batch), 0
    assert found.astray is not None
    for source, row, lost in zip(batch.source.tolist(), found.pieces.tolist(), found.astray.tolist(), strict=True):
        words = [piece for piece in source if piece not in (PAD, EOS)]
        would_end += log_prob_of(model, words, [6, 5, EOS]) > log_prob_of(model, words, [*prefix])
        for pieces, astray in zip(row, lost, strict=True):
            real = [piece for piece in pieces if piece != PAD]
            assert real[:3] == [*prefix]
            assert astray == (log_prob_of(model, words, [*real[:-1], BREAK]) > log_prob_of(model, words, real))
    assert 0 < would_end < 40


SINGLE_PREFIXES = [(7, 5), (), (8,), (6, 6, 6)]


@pytest.mark.parametrize("counted", [False, True], ids=["any lines", "one line"])
def test_a_wide_beam_finds_the_best_with_the_given_beginning(counted: bool) -> None:
    """Exhaustive search over all translations of at most 5 pieces that begin so."""
    model, sources = TinyModel(vocabulary=9), random_sources(4, seed=4)
    batch = batch_of(sources, [5, 4, 5, 5])
    lines = [[limit] for limit in batch.limits] if counted else None
    batch = SourceBatch(batch.source, batch.limits, batch.keys, lines=lines, prefixes=list(SINGLE_PREFIXES))
    found = found_by({"beam": 800, "n_best": 1, "length_penalty": 0.0}, batch)
    greedy = found_by({"method": "greedy"}, batch)
    words = [piece for piece in range(EOS + 1, 9) if not counted or piece != BREAK]
    for row, (source, prefix, limit) in enumerate(zip(sources, SINGLE_PREFIXES, batch.limits, strict=True)):
        room = limit - 1 - len(prefix)
        endings = [ending for size in range(room + 1) for ending in product(words, repeat=size)]
        scores = {(*prefix, *ending, EOS): log_prob_of(model, source, [*prefix, *ending, EOS]) for ending in endings}
        best = max(scores, key=lambda pieces: scores[pieces])
        assert tuple(piece for piece in found.pieces[row, 0].tolist() if piece != PAD) == best
        assert found.log_probs[row, 0].item() == pytest.approx(scores[best], abs=1e-3)
        assert tuple(greedy.pieces[row, 0, : len(prefix)].tolist()) == prefix


def test_a_beginning_has_its_pieces_on_a_shortlist() -> None:
    batch = batch_of(random_sources(3, seed=4), 6)
    batch = SourceBatch(batch.source, batch.limits, batch.keys, prefixes=[(7, 50), (), (40,)])
    restricted = batch.restricted(torch.tensor([0, 1, 2, 3, 7, 41]))
    assert restricted.pieces is not None
    assert restricted.prefixes is not None
    assert restricted.pieces.tolist() == [0, 1, 2, 3, 7, 40, 41, 50]
    assert [[int(restricted.pieces[number]) for number in row] for row in restricted.prefixes] == [[7, 50], [], [40]]
