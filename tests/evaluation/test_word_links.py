"""Links between words, learned from the pairs themselves."""

import itertools
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from mtkit.evaluation import word_links
from mtkit.evaluation.word_links import ITERATIONS, NO_WORD, TENSION, link_pairs, prior_of_places, terms_of

SOURCES = [line.split() for line in ("the dog", "the old dog", "a dog sees the cat", "a cat", "the old house", "old")]
TARGETS = [line.split() for line in ("der hund", "der alte hund", "hund katze der sieht", "katze", "haus alte", "alte")]


def naive(sources: list[list[str]], targets: list[list[str]]) -> list[list[tuple[int, int]]]:
    """fast_align's model, word by word."""

    def prior(place: int | None, other: int, source: int, target: int) -> float:
        if place is None:
            return NO_WORD
        near = [math.exp(-TENSION * abs((each + 1) / source - (other + 1) / target)) for each in range(source)]
        return (1 - NO_WORD) * near[place] / sum(near)

    def rank(strong: float, likely: float) -> tuple[float, float]:
        return round(strong, 9), round(likely, 9)

    likely: dict[tuple[str | None, str], float] = defaultdict(lambda: 1.0)

    def posterior(source: list[str], target: list[str], other: int) -> dict[int | None, float]:
        places = [None, *range(len(source))]
        joint = {
            place: likely[None if place is None else source[place], target[other]]
            * prior(place, other, len(source), len(target))
            for place in places
        }
        return {place: value / sum(joint.values()) for place, value in joint.items()}

    for _ in range(ITERATIONS):
        counts: dict[tuple[str | None, str], float] = defaultdict(float)
        totals: dict[str | None, float] = defaultdict(float)
        for source, target in zip(sources, targets, strict=True):
            for other, spoken in enumerate(target):
                for place, share in posterior(source, target, other).items():
                    word = None if place is None else source[place]
                    counts[word, spoken] += share
                    totals[word] += share
        likely.clear()
        likely.update({pair: count / totals[pair[0]] for pair, count in counts.items()})
        strength = {
            (one, other): count**2 / totals[one] / sum(line.count(other) for line in targets)
            for (one, other), count in counts.items()
        }
    links = []
    for source, target in zip(sources, targets, strict=True):
        table = [posterior(source, target, other) for other in range(len(target))]
        links.append(
            [
                (place, other)
                for other, place in itertools.product(range(len(target)), range(len(source)))
                if max(table[other], key=lambda each: round(table[other][each], 9)) == place
                and max(
                    range(len(target)), key=lambda each: rank(strength[source[place], target[each]], table[each][place])
                )
                == other
            ]
        )
    return links


def test_links_are_those_of_the_model_written_word_by_word() -> None:
    links = link_pairs(SOURCES, TARGETS)
    assert links == naive(SOURCES, TARGETS)
    assert links[1] == [(0, 0), (1, 1), (2, 2)]
    draw = random.Random(4)
    sources, targets = (
        [[f"{side}{int(draw.paretovariate(0.5)) % 40}" for _ in range(draw.randint(1, 9))] for _ in range(80)]
        for side in "st"
    )
    links = link_pairs(sources, targets)
    assert sum(map(len, links)) > 100
    assert links == naive(sources, targets)


def test_near_places_are_likelier() -> None:
    near, far = math.exp(-TENSION * 0.5), 1.0  # |1/2 - 2/2|, and the same place
    share = (1 - NO_WORD) / (near + far)
    assert prior_of_places(2, 2) == pytest.approx(
        np.array([[NO_WORD, far, near], [NO_WORD, near, far]]) * [1, share, share]
    )
    assert prior_of_places(7, 3).sum(1) == pytest.approx(1)


def test_words_in_another_order_find_their_translations() -> None:
    draw = random.Random(1)
    sources = [[f"s{number}" for number in draw.sample(range(30), 6)] for _ in range(200)]
    targets = [[word.replace("s", "t") for word in draw.sample(line, 6)] for line in sources]
    links = link_pairs(sources, targets)
    found = [
        (source[one][1:], target[other][1:])
        for source, target, line in zip(sources, targets, links, strict=True)
        for one, other in line
    ]
    assert sum(one == other for one, other in found) > 0.97 * 6 * 200
    assert len(found) <= 6 * 200


def test_of_several_characters_for_a_word_the_same_one_is_linked_each_time() -> None:
    draw = random.Random(2)
    names = {word: [f"{word}{number}" for number in range(3)] for word in "abcdefghijklmnop"}
    sources = [draw.sample(sorted(names), 4) for _ in range(150)]
    targets = [[character for word in draw.sample(line, 4) for character in names[word]] for line in sources]
    linked: dict[str, Counter[str]] = defaultdict(Counter)
    for source, target, links in zip(sources, targets, link_pairs(sources, targets), strict=True):
        for one, other in links:
            linked[source[one]][target[other]] += 1
    assert all(counts.most_common(1)[0][1] > 0.95 * counts.total() for counts in linked.values())
    assert sum(counts.total() for counts in linked.values()) > 0.9 * 4 * 150


def test_words_that_occur_twice_have_a_link_each() -> None:
    links = link_pairs([["a", "b", "a"], ["a", "c"], ["b"]], [["A", "B", "A"], ["A", "C"], ["B"]])
    assert links[0] == [(0, 0), (1, 1), (2, 2)]


def test_lines_without_words_and_unusually_long_lines_have_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    assert link_pairs([], []) == []
    assert link_pairs([[], ["a"], ["a"]], [["x"], [], ["x"]]) == [[], [], [(0, 0)]]
    monkeypatch.setattr(word_links, "LONGEST", 2)
    assert link_pairs(SOURCES, TARGETS)[1:3] == [[], []]


def test_of_much_text_every_nth_line_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, targets = SOURCES * 2, TARGETS * 2
    alternating = [line for pair in zip(sources, [["?"]] * 12, strict=True) for line in pair]
    others = [line for pair in zip(targets, [["!"]] * 12, strict=True) for line in pair]
    cells = sum((len(one) + 1) * len(other) for one, other in zip(alternating, others, strict=True))
    expected = link_pairs(sources, targets)
    monkeypatch.setattr(word_links, "CELLS", cells // 2 + 1)
    links = link_pairs(alternating, others)
    assert links[::2] == expected
    assert links[1::2] == [[]] * 12  # words that were not learned


def test_words_have_no_case_and_no_punctuation() -> None:
    assert terms_of("L'Objet “dict.items()”, ÉTÉ!") == ["l", "objet", "dict", "items", "été"]
    assert terms_of("हिन्दी में") == ["हिन्दी", "में"]
    assert terms_of("犬が。 dog") == ["犬", "が", "dog"]
    assert terms_of(" … \u3000") == []
