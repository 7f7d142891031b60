"""Beam search with required terms, against all sequences of a tiny vocabulary and against its literal rules."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from mtkit.decoding.contract import Hypotheses, RequiredTerms, SourceBatch, Term
from mtkit.decoding.engines.model_engine import SEARCHES
from mtkit.decoding.search.terms import missing
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BOS, EOS
from tests.decoding.tiny import FIRST_WORD, TinyModel, batch_of, log_prob_of, random_sources

VOCABULARY = 8
WORDS = range(FIRST_WORD, VOCABULARY)
STARTS_INSIDE, ENDS_INSIDE = (5, 6), (5, 7)
"""Pieces that begin, and that end, with a letter; 4 is a piece of punctuation."""

CASES = {
    "one piece": [Term(((4,),))],
    "twice, over a word border": [Term(((6, 7),), 2)],
    "twice, overlapping itself": [Term(((4, 4),), 2)],
    "two spellings": [Term(((4, 5),)), Term(((7, 6), (6,)))],
    "overlapping": [Term(((4, 7, 4),)), Term(((7, 4),))],
    "with a beginning that repeats": [Term(((4, 4, 7),))],
    "too long for the limit": [Term(((4, 5, 6, 7, 4),)), Term(((7,),))],
    "all too long": [Term(((4, 4, 4, 4, 4),), 3)],
}


def required(of_segments: list[list[Term]]) -> RequiredTerms:
    inside = torch.zeros(2, VOCABULARY, dtype=torch.bool)
    inside[0, list(STARTS_INSIDE)] = inside[1, list(ENDS_INSIDE)] = True
    return RequiredTerms([tuple(terms) for terms in of_segments], inside[0], inside[1])


def with_terms(batch: SourceBatch, of_segments: list[list[Term]]) -> SourceBatch:
    return replace(batch, terms=required(of_segments))


@torch.inference_mode()
def found_by(batch: SourceBatch, **settings: object) -> Hypotheses:
    return SEARCHES["beam"](TinyModel(VOCABULARY), batch, DecodingSettings.model_validate(settings))


def texts(found: Hypotheses, row: int) -> list[list[int]]:
    rows = zip(found.pieces[row], found.lengths[row].tolist(), strict=True)
    return [pieces[:length].tolist() for pieces, length in rows if length]


def matches(term: Term, pieces: list[int]) -> list[re.Match[str]]:
    """The occurrences of a term, by a regular expression over the digits of the pieces."""
    spellings = []
    for form in term.forms:
        before = f"(?<![{''.join(map(str, ENDS_INSIDE))}])" if form[0] in STARTS_INSIDE else ""
        after = f"(?![{''.join(map(str, STARTS_INSIDE))}])" if form[-1] in ENDS_INSIDE else ""
        spellings.append(before + "".join(map(str, form)) + after)
    return [*re.finditer("|".join(spellings), "".join(map(str, pieces)))]


def lacks(terms: list[Term], pieces: list[int]) -> int:
    return sum(max(0, term.count - len(matches(term, pieces))) for term in terms)


def that_fit(terms: list[Term], limit: int) -> list[Term]:
    fitting: list[Term] = []
    for term in (Term(many.forms) for many in terms for _ in range(many.count)):
        if sum(min(map(len, one.forms)) for one in [*fitting, term]) < limit:
            fitting.append(term)
    return [
        Term(forms, sum(one.forms == forms for one in fitting)) for forms in dict.fromkeys(t.forms for t in fitting)
    ]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_a_beam_that_holds_everything_finds_what_exhaustive_search_finds(name: str, alpha: float) -> None:
    limit, model, sources = 5, TinyModel(VOCABULARY), [[4, 5, 6], [6]]
    everything = [[*words, EOS] for length in range(limit) for words in product(WORDS, repeat=length)]
    batch = with_terms(batch_of(sources, limit), [CASES[name], CASES[name][:1]])
    found = found_by(batch, beam=700, length_penalty=alpha)
    for row, terms in enumerate([CASES[name], CASES[name][:1]]):
        fitting = that_fit(terms, limit)
        allowed = [pieces for pieces in everything if len(pieces) == limit or not lacks(fitting, pieces)]
        keys = {
            tuple(pieces): (lacks(fitting, pieces), -log_prob_of(model, sources[row], pieces) / len(pieces) ** alpha)
            for pieces in allowed
        }
        assert [tuple(pieces) for pieces in texts(found, row)] == sorted(keys, key=lambda pieces: keys[pieces])


def test_a_term_that_repeats_its_beginning_does_not_begin_within_a_word() -> None:
    limit, terms = 6, [Term(((5, 5, 6),))]
    found = texts(found_by(with_terms(batch_of([[4, 5, 6]], limit), [terms]), beam=1000), 0)
    assert [5, 5, 6, EOS] in found
    assert [5, 5, 5, 6, EOS] not in found  # "aab" within "aaab"
    assert not [pieces for pieces in found if len(pieces) < limit and lacks(terms, pieces)]


def bank(terms: list[Term], pieces: list[int]) -> int:
    """The number of required pieces that a hypothesis has."""
    total = 0
    for term in terms:
        occurrences, size = matches(term, pieces), min(map(len, term.forms))
        after = pieces[max((match.end() for match in occurrences), default=0) :]
        begun = max(size - len(form) + longest_beginning(form, after, pieces) for form in term.forms)
        total += size * term.count if len(occurrences) >= term.count else size * len(occurrences) + max(0, begun)
    return total


def longest_beginning(form: tuple[int, ...], after: list[int], pieces: list[int]) -> int:
    """The number of pieces of a spelling that a hypothesis ends with, since its last occurrence."""
    for size in range(min(len(form), len(after)), 0, -1):
        before = pieces[-size - 1] if len(pieces) > size else 0
        if tuple(after[-size:]) == form[:size] and not (before in ENDS_INSIDE and form[0] in STARTS_INSIDE):
            return size
    return 0


def by_the_rules(model: TinyModel, source: list[int], terms: list[Term], limit: int, beam: int) -> list[list[int]]:
    """The rules of the module written literally, for one segment."""
    width = beam + sum(term.count * min(map(len, term.forms)) for term in terms)
    alive, ended = [list[int]()], list[list[int]]()
    score: dict[tuple[int, ...], float] = {}
    batch = batch_of([source], 1)
    states = {(): (0.0, BOS, model.start(model.encode(batch.source, batch.valid)))}
    for step in range(limit):
        found = []
        for prefix in alive:
            total, last, state = states[tuple(prefix)]
            logits, state, _ = model.step(torch.tensor([[last]]), state)
            log_probs = logits.whole()[0, 0].double().log_softmax(-1).tolist()
            score |= {(*prefix, piece): total + log_probs[piece] for piece in (EOS, *WORDS)}
            states |= {(*prefix, piece): (total + log_probs[piece], piece, state) for piece in WORDS}
            likeliest = sorted((EOS, *WORDS), key=lambda piece: -score[*prefix, piece])[: 2 * beam]
            following = {
                form[size]
                for term in terms
                for form in term.forms
                for size in (
                    0,
                    longest_beginning(form, prefix[max((m.end() for m in matches(term, prefix)), default=0) :], prefix),
                )
                if size < len(form) and (size == 0 or len(matches(term, prefix)) < term.count)
            }
            pieces = {EOS} if step + 1 == limit else {*likeliest, *following, EOS}
            found += [[*prefix, piece] for piece in pieces]
        found = [pieces for pieces in found if pieces[-1] != EOS or step + 1 == limit or not lacks(terms, pieces)]
        found.sort(key=lambda pieces: -score[tuple(pieces)])
        banks = [bank(terms, pieces) for pieces in found]
        turns = [banks[:place].count(number) for place, number in enumerate(banks)]
        order = sorted(range(len(found)), key=lambda place: (turns[place], -banks[place]))
        found = [found[place] for place in order]
        ended += [pieces for pieces in found[:width] if pieces[-1] == EOS]
        if len(ended) >= beam:
            break
        alive = [pieces for pieces in found if pieces[-1] != EOS][:width]
    return sorted(ended, key=lambda pieces: (lacks(terms, pieces), -score[tuple(pieces)] / len(pieces)))[:beam]


@pytest.mark.parametrize("beam", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_banks_take_turns(name: str, beam: int) -> None:
    limit, model, sources = 8, TinyModel(VOCABULARY), random_sources(6, longest=4)
    found, terms = found_by(with_terms(batch_of(sources, limit), [CASES[name]] * len(sources)), beam=beam), CASES[name]
    for row, source in enumerate(sources):
        assert texts(found, row) == by_the_rules(model, source, that_fit(terms, limit), limit, beam)


def test_a_segment_gets_the_same_alone_and_in_any_batch() -> None:
    sources, cases = random_sources(25), list(CASES.values())
    terms = [cases[row % len(cases)] for row in range(len(sources))]
    limits = [4 + len(source) for source in sources]
    together = found_by(with_terms(batch_of(sources, limits), terms), beam=3)
    for row, source in enumerate(sources):
        alone = found_by(with_terms(batch_of([source], limits[row]), [terms[row]]), beam=3)
        assert texts(alone, 0) == texts(together, row)
        torch.testing.assert_close(alone.scores[0], together.scores[row], atol=1e-5, rtol=0)


def test_hypotheses_contain_their_terms_and_have_the_probabilities_of_forced_decoding() -> None:
    model, sources = TinyModel(VOCABULARY), random_sources(12)
    terms = [Term(((6, 7, 4),)), Term(((5, 7),), 2)]
    found = found_by(with_terms(batch_of(sources, 16), [terms] * 12), beam=4)
    for row, source in enumerate(sources):
        hypotheses = texts(found, row)
        assert len({tuple(pieces) for pieces in hypotheses}) == 4
        for pieces, log_prob in zip(hypotheses, found.log_probs[row].tolist(), strict=True):
            assert not lacks(terms, pieces)
            assert log_prob == pytest.approx(log_prob_of(model, source, pieces), abs=1e-4)


def test_no_terms_of_a_segment_leave_plain_beam_search() -> None:
    sources = random_sources(10)
    plain = found_by(batch_of(sources, 9), beam=3)
    for found in (
        found_by(with_terms(batch_of(sources, 9), [[] for _ in sources]), beam=3),
        found_by(with_terms(batch_of(sources, 9), [[Term(((4,) * 9,))] for _ in sources]), beam=3),
    ):
        assert torch.equal(found.pieces, plain.pieces)


def test_a_coverage_penalty_and_forbidden_repeats_combine_with_terms() -> None:
    sources, terms = random_sources(8), [Term(((6, 7),), 2)]
    found = found_by(with_terms(batch_of(sources, 12), [terms] * 8), beam=3, no_repeat_ngram=2, coverage_penalty=0.2)
    hypotheses = [pieces for row in range(8) for pieces in texts(found, row)]
    for pieces in hypotheses:
        line = "".join(map(str, pieces)).split("4")  # a repeat is forbidden within a line, and 4 is a break
        assert max(part.count("67") for part in line) <= 1
        assert len(pieces) == 12 or not lacks(terms, pieces)


def test_missing_counts_occurrences_as_a_regular_expression() -> None:
    for terms in CASES.values():
        for words in product(WORDS, repeat=5):
            assert missing([*words, EOS], terms, required([terms])) == lacks(terms, [*words, EOS])


def test_a_model_without_finite_probabilities_ends_without_hypotheses() -> None:
    model = TinyModel(VOCABULARY)
    with torch.no_grad():
        model.source[4] = torch.nan
        batch = with_terms(batch_of([[4, 5], [5, 6]], 6), [[Term(((7,),))]] * 2)
        found = SEARCHES["beam"](model, batch, DecodingSettings(beam=3))
    assert found.log_probs[0].eq(-torch.inf).all()
    assert found.log_probs[1].isfinite().all()
