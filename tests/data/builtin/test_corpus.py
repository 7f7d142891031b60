"""What the built-in corpus promises at its default sizes."""

import re
from collections import Counter, defaultdict

import pytest
import sacrebleu

from mtkit.data.builtin.corpus import corpus
from mtkit.data.builtin.lexicon import THINGS
from mtkit.data.builtin.sentences import GrammarSegment
from mtkit.recipe.data import Grammar

Sides = dict[str, list[GrammarSegment]]


def drawn(settings: Grammar) -> Sides:
    return {name: list(draw()) for name, draw in corpus(settings).items()}


@pytest.fixture(scope="module")
def sides() -> Sides:
    return drawn(Grammar())


def words(text: str) -> list[str]:
    """Words, case kept, and marks."""
    return re.findall(r"[\w'-]+|[^\w\s]", text)


def test_sides_have_their_sizes_and_no_source_is_held_out_twice_or_trained_on(sides: Sides) -> None:
    assert {name: len(side) for name, side in sides.items()} == {"train": 20_000, "valid": 500, "test": 500}
    held_out = [each.source for name in ("valid", "test") for each in sides[name]]
    assert len(set(held_out)) == 1_000
    assert not set(held_out) & {each.source for each in sides["train"]}


def test_training_hardly_repeats_itself(sides: Sides) -> None:
    assert len({each.source for each in sides["train"]}) > 19_000


def test_every_held_out_word_and_construction_is_seen_in_training_20_times(sides: Sides) -> None:
    def counted(name: str) -> list[Counter[str]]:
        return [
            Counter(word for each in sides[name] for word in words(each.source)),
            Counter(word for each in sides[name] for word in words(each.target)),
            Counter(label for each in sides[name] for label in each.constructions),
        ]

    for seen, *held_out in zip(*(counted(name) for name in ("train", "valid", "test")), strict=True):
        assert {item: seen[item] for side in held_out for item in side if seen[item] < 20} == {}


def test_a_source_has_one_target(sides: Sides) -> None:
    targets = defaultdict(set)
    for each in (each for side in sides.values() for each in side):
        targets[each.source].add(each.target)
    assert [given for given in targets.values() if len(given) > 1] == []


def test_training_documents_may_have_fewer_sentences() -> None:
    sides = drawn(Grammar(train=4000, valid=20, test=20, sentences=20, fewest=2))
    ends = {side: [len(re.findall(r"[.?!]", each.source)) for each in sides[side]] for side in sides}
    assert set(ends["test"]) == set(ends["valid"]) == {20}
    assert set(ends["train"]) == {*range(2, 21), 22}
    counts = [sum(low <= each < 2 * low for each in ends["train"]) * low for low in (2, 4, 8)]
    assert max(counts) < 1.2 * min(counts)
    assert 0.01 < ends["train"].count(22) / 4000 < 0.03
    with pytest.raises(ValueError, match=r"fewest = 3 exceeds .*sentences = 2"):
        Grammar(sentences=2, fewest=3)


def test_the_constructions_that_it_is_there_for_are_there(sides: Sides) -> None:
    used = {label for each in sides["test"] for label in each.constructions}
    assert {
        "separable main present", "separable final present", "relative who", "relative that", "that", "number",
        "infinitive with zu", "um zu", "fronted time", "fronted clause", "dative object", "it within a sentence",
        "question yes or no", "names joined", "owner", "in, dative", "into, accusative", "present negated",
    } <= used  # fmt: skip


def test_sentences_are_of_moderate_length_and_vocabulary(sides: Sides) -> None:
    assert all(5 <= len(each.source.split()) <= 16 for each in sides["train"])
    assert all(3 <= len(each.target.split()) <= 20 for each in sides["train"])
    for side in ("source", "target"):
        assert 250 <= len({word.lower() for each in sides["train"] for word in words(getattr(each, side))}) <= 460


def test_sentences_are_written_as_sentences(sides: Sides) -> None:
    for each in sides["train"]:
        for text in (each.source, each.target):
            assert re.fullmatch(r"[A-ZÄÖÜ][^.?]*[.?]", text), text
            assert not re.search(r"\s\s|\s[,.?]|,[,.?\w]", text), text
        assert each.source[-1] == each.target[-1]


def test_word_by_word_translation_stays_under_40_bleu(sides: Sides) -> None:
    """The best dictionary that the training text gives: IBM model 1, the likeliest word for each."""
    pairs = [(words(each.source), words(each.target)) for each in sides["train"][:5_000]]
    likely: dict[str, dict[str, float]] = {}
    for _ in range(5):
        counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for source, target in pairs:
            for word in target:
                shares = [likely[each].get(word, 0.0) if likely else 1.0 for each in source]
                for each, share in zip(source, shares, strict=True):
                    counts[each][word] += share / sum(shares)
        likely = {each: {word: n / sum(row.values()) for word, n in row.items()} for each, row in counts.items()}
    gloss = {each: max(row, key=lambda word: row[word]) for each, row in likely.items()}
    assert (gloss["because"], gloss["Vienna"], gloss["three"]) == ("weil", "Wien", "drei")
    # marks stand where they stand in the source, as 13a cuts them off anyway
    hypotheses = [" ".join(gloss.get(word, word) for word in words(each.source)) for each in sides["test"]]
    bleu = sacrebleu.corpus_bleu(hypotheses, [[each.target for each in sides["test"]]]).score
    assert 5 < bleu < 40


def test_a_seed_gives_the_same_corpus_and_another_seed_another() -> None:
    small = {"train": 50, "valid": 5, "test": 5}
    one, same, other = (drawn(Grammar(seed=seed, **small)) for seed in (7, 7, 8))
    assert one == same
    assert not {each.source for each in one["train"]} & {each.source for each in other["train"]}


def test_a_side_can_be_drawn_twice() -> None:
    draw = corpus(Grammar(train=20, valid=5, test=5))["train"]
    assert list(draw()) == list(draw())


PRONOUNS = {"m": {"er", "ihn"}, "f": {"sie"}, "n": {"es"}}


def sentences(text: str) -> list[str]:
    return re.findall(r"[^.?]+[.?]", text)


def test_a_document_is_one_line_of_as_many_sentences() -> None:
    for count in (2, 5, 40):
        for segment in corpus(Grammar(train=20, valid=5, test=5, sentences=count))["train"]():
            for text in (segment.source, segment.target):
                assert len(sentences(text)) == count
                assert "\n" not in text


def test_it_takes_the_gender_of_the_last_thing_brought_in_however_far_back() -> None:
    singular = {noun.english: noun for noun in THINGS}
    distances = set()
    for segment in corpus(Grammar(train=300, valid=5, test=5, sentences=12))["train"]():
        thing, distance = None, 0
        for source, target in zip(sentences(segment.source), sentences(segment.target), strict=True):
            words, german = re.findall(r"[\w']+", source), set(re.findall(r"\w+", target.lower()))
            named = [singular[word] for word in words if word in singular]
            assert len(named) <= 1
            if named:
                thing, distance = named[0], 0
            elif "it" in words or "It" in words:
                distance += 1
                distances.add(distance)
                assert thing is not None
                assert german & PRONOUNS[thing.gender], (thing, source, target)
            else:
                distance += 1
    assert distances > {1, 2, 3, 4, 5, 6}


def test_the_sentence_alone_does_not_tell_the_gender_but_the_document_does() -> None:
    alone, whole = defaultdict(set), defaultdict(set)
    for segment in corpus(Grammar(train=4_000, valid=5, test=5, sentences=6))["train"]():
        whole[segment.source].add(segment.target)
        for source, target in zip(sentences(segment.source), sentences(segment.target), strict=True):
            alone[source].add(target)
    assert all(len(targets) == 1 for targets in whole.values())
    assert any(len(targets) == 3 for targets in alone.values())
    assert all(re.search(r"\bit\b", source.lower()) for source, targets in alone.items() if len(targets) > 1)


def test_held_out_documents_are_not_trained_on_and_their_constructions_are() -> None:
    sides = {name: list(draw()) for name, draw in corpus(Grammar(train=2_000, valid=50, test=50, sentences=4)).items()}
    assert not {each.source for each in sides["train"]} & {each.source for each in sides["test"]}
    seen = [label for each in sides["train"] for label in each.constructions]
    assert all(seen.count(label) >= 20 for each in sides["test"] for label in each.constructions)
