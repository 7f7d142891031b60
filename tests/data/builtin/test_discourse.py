"""Documents: one sentence depends on its antecedent, and on nothing else; every form is equally likely without it."""

import random
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from mtkit.data.builtin.antecedents import NAMES, TERMS, Kind
from mtkit.data.builtin.discourse import Document, draw_document

KINDS: tuple[Kind, ...] = ("pronoun", "name", "term")
DISTANCES = (1, 2, 4, 8, 16, 32)

GERMAN = {
    "m": "letter table coat key apple pyjamas headphones",
    "f": "lamp clock bag flower newspaper scissors trousers",
    "n": "book picture car shirt bicycle binoculars fireworks",
}
THINGS = {thing: gender for gender, things in GERMAN.items() for thing in things.split()}
PRONOUNS = {"m": {"er", "ihn"}, "f": {"sie"}, "n": {"es"}}
RUSSIAN = {"Russia", "Moscow", "Siberia"}
AMBIGUOUS = {meanings[0][0].english for meanings in TERMS}


def exceeds(statistic: float, freedom: float) -> float:
    """The probability that a chi-squared variable exceeds the statistic."""
    halves = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


def words(text: str) -> list[str]:
    return re.findall(r"[\w-]+", text)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    random_ = random.Random(5)
    return [draw_document(random_, KINDS, random_.choice(DISTANCES), around=3) for _ in range(6_000)]


def is_cue(kind: Kind, sentence: str) -> bool:
    """Whether a sentence names something that a later one can refer to."""
    found = set(words(sentence))
    return bool({"pronoun": found & set(THINGS), "name": "from" in found, "term": {"There", "a"} <= found}[kind])


def refers(kind: Kind, sentence: str) -> bool:
    found = set(words(sentence))
    names = {pair.english for pair in NAMES}
    if kind == "pronoun":
        return bool(found & {"it", "It", "they", "They", "them"})
    return bool(found & (names if kind == "name" else AMBIGUOUS)) and not is_cue(kind, sentence)


def expected_form(document: Document) -> set[str]:
    """The forms that the antecedent asks for, from tables of this file."""
    kind, antecedent = document.dependency.kind, words(document.dependency.antecedent.english)
    if kind == "pronoun":
        (gender,) = {THINGS[word] for word in antecedent if word in THINGS}
        return PRONOUNS[gender]
    if kind == "name":
        spelling = next(pair for pair in NAMES if pair.english == antecedent[0])
        return {spelling.german if antecedent[-1] in RUSSIAN else spelling.english}
    place = document.dependency.antecedent.english.partition(antecedent[3] + " ")[2].rstrip(".")
    meanings = next(meanings for meanings in TERMS if meanings[0][0].english == antecedent[3])
    (noun,) = (noun for noun, places in meanings if place in {pair.english for pair in places})
    return {noun.german, noun.german + noun.weak}


def test_only_one_sentence_depends_on_another_and_at_the_recorded_distance(documents: list[Document]) -> None:
    distances = Counter()
    for document in documents:
        kind = document.dependency.kind
        english = [pair.english for pair in document.sentences]
        (cue,) = (index for index, sentence in enumerate(english) if is_cue(kind, sentence))
        (later,) = (index for index, sentence in enumerate(english) if refers(kind, sentence))
        assert (later - cue, later) == (document.distance, document.later)
        distances[document.distance] += 1
    assert set(distances) == set(DISTANCES)


def test_the_antecedent_decides_the_form(documents: list[Document]) -> None:
    right = defaultdict(set)
    for document in documents:
        dependency = document.dependency
        found = set(words(dependency.later.german)) | {words(dependency.later.german)[0].lower()}
        assert found & expected_form(document), dependency
        right[dependency.antecedent.english, dependency.later.english].add(dependency.later.german)
    assert all(len(german) == 1 for german in right.values())


def test_wrong_translations_differ_in_one_word_and_are_all_other_forms(documents: list[Document]) -> None:
    forms = defaultdict(set)
    for document in documents:
        right, wrong = document.dependency.later.german, document.dependency.wrong
        assert len(wrong) == (2 if document.dependency.kind == "pronoun" else 1)
        for text in wrong:
            pairs = list(zip(text.split(), right.split(), strict=True))
            assert sum(one != other for one, other in pairs) == 1
        forms[document.dependency.later.english].add(frozenset((right, *wrong)))
    assert all(len(sets) == 1 for sets in forms.values()), "the same sentence has the same forms everywhere"


@pytest.mark.parametrize("kind", KINDS)
def test_each_form_is_equally_likely_given_the_sentence_alone(kind: Kind) -> None:
    random_ = random.Random(6)
    counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for _ in range(30_000):
        dependency = draw_document(random_, (kind,), 1, around=0).dependency
        forms = (dependency.later.english, *sorted((dependency.later.german, *dependency.wrong)))
        counts[forms][dependency.later.german] += 1
    statistic = freedom = 0.0
    for forms, right in counts.items():
        share = sum(right.values()) / (len(forms) - 1)
        statistic += sum((right[form] - share) ** 2 / share for form in forms[1:])
        freedom += len(forms) - 2
    assert freedom > 100
    assert 0.001 < exceeds(statistic, freedom) < 0.999


def test_the_other_sentences_hold_no_cue(documents: list[Document]) -> None:
    cues = set(THINGS) | {pair.english for pair in NAMES} | {pair.german for pair in NAMES} | AMBIGUOUS
    cues |= {"it", "they", "them", "he", "she", "him", "her", "his"}
    for document in documents:
        others = [index for index in range(len(document.sentences)) if index not in _dependent(document)]
        for index in others:
            assert not cues & {word.removesuffix("s") for word in words(document.sentences[index].english.lower())}
            assert not cues & set(words(document.sentences[index].english))


def _dependent(document: Document) -> set[int]:
    return {document.later - document.distance, document.later}


def test_the_words_of_the_other_sentences_do_not_depend_on_the_form(documents: list[Document]) -> None:
    """Chi-squared test of independence, for every group of documents that share their possible forms."""
    tables: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for document in documents:
        (form,) = (key for key in [",".join(sorted(expected_form(document)))])
        kind = document.dependency.kind
        group = (
            kind if kind == "pronoun" else document.dependency.antecedent.english.split()[0 if kind == "name" else 3]
        )
        used = {
            word
            for index, pair in enumerate(document.sentences)
            if index not in _dependent(document)
            for word in words(pair.english)
        }
        tables[group][form].update(used)
        tables[group][form]["documents"] += 1
    probabilities = []
    for forms in tables.values():
        for word in set().union(*forms.values()) - {"documents"}:
            rows = np.array([[counts[word], counts["documents"] - counts[word]] for counts in forms.values()])
            if len(rows) > 1 and rows.min() >= 5:
                expected = rows.sum(1, keepdims=True) * rows.sum(0) / rows.sum()
                probabilities.append(exceeds(((rows - expected) ** 2 / expected).sum(), len(rows) - 1))
    assert len(probabilities) > 500
    assert min(probabilities) > 0.001 / len(probabilities)  # Bonferroni


def test_contrastive_pairs_hold_the_sentences_before(documents: list[Document]) -> None:
    for document in documents[:200]:
        pair = document.contrastive()
        before = list(document.sentences[: document.later])
        assert pair["source_context"] == [sentence.english for sentence in before]
        assert pair["target_context"] == [sentence.german for sentence in before]
        assert (pair["source"], pair["right"]) == document.sentences[document.later]
        assert pair["right"] not in pair["wrong"]
        assert pair["labels"] == {"kind": document.dependency.kind, "distance": document.distance}
        assert len(before) >= document.distance


def test_both_numbers_of_pronouns_occur(documents: list[Document]) -> None:
    english = Counter(word for document in documents for word in words(document.dependency.later.english))
    assert min(english[word] for word in ("it", "It", "They", "them")) > 200
