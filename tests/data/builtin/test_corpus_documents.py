import re
from collections import defaultdict

from mtkit.data.builtin.corpus import corpus
from mtkit.data.builtin.lexicon import THINGS
from mtkit.recipe.data import Grammar

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
