"""Sides that are off by one line are noticed near the line where they part, and others are not suspected."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mtkit.data.builtin.corpus import corpus as builtin_corpus
from mtkit.recipe.data import Grammar
from mtkit.text.misaligned import first_suspicious
from mtkit.text.text_files import Lines


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    """Segments of 1 to 4 sentences, with a name or a number in some."""
    drawn = builtin_corpus(Grammar(train=1500, valid=1, test=1))["train"]()
    rng = random.Random(1)
    made = []
    for segment in drawn:
        copied = f" {rng.randrange(1000)}." if rng.random() < 0.2 else ""
        made.append((segment.source + copied, segment.target + copied))
    return made


def test_sides_that_match_raise_no_suspicion(pairs: list[tuple[str, str]]) -> None:
    assert first_suspicious(pairs) is None
    assert first_suspicious([]) is None
    assert first_suspicious(pairs[:1]) is None
    assert first_suspicious([("a", "b")] * 500) is None
    assert first_suspicious([("", "")] * 500) is None


def parity(rng: random.Random) -> tuple[str, str]:
    bits = [rng.choice("01") for _ in range(rng.randint(3, 20))]
    return " ".join(bits), str(bits.count("1") % 2)


def unrelated(rng: random.Random) -> tuple[str, str]:
    source, target = (" ".join(rng.choice("abcdefghij") for _ in range(rng.randint(1, 30))) for _ in range(2))
    return source, target


@pytest.mark.parametrize("draw", [parity, unrelated])
def test_sides_that_say_little_about_each_other_are_not_suspected(
    draw: Callable[[random.Random], tuple[str, str]],
) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        assert first_suspicious([draw(rng) for _ in range(1000)]) is None


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("missing", [1, 40, 700, 1200])
def test_a_missing_line_is_found_to_within_a_few_lines(pairs: list[tuple[str, str]], side: int, missing: int) -> None:
    sides = [[pair[each] for pair in pairs] for each in (0, 1)]
    del sides[side][missing - 1]
    found = first_suspicious(zip(*sides, strict=False))
    assert found is not None
    assert abs(found - missing) <= 12


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("missing", [1, 2, 40, 150])
def test_where_all_lines_are_alike_but_for_their_names_the_line_is_exact(side: int, missing: int) -> None:
    sides = [[f"segment {number} has a name" for number in range(1, 201)] for _ in range(2)]
    del sides[side][missing - 1]
    assert first_suspicious(zip(*sides, strict=False)) == missing


def test_a_missing_line_is_found_near_the_end_too(pairs: list[tuple[str, str]]) -> None:
    found = 0
    for first in range(0, 1200, 60):
        sources, targets = ([pair[each] for pair in pairs[first : first + 60]] for each in (0, 1))
        del sources[30]
        found += first_suspicious(zip(sources, targets, strict=False)) is not None
    assert found >= 15


def test_a_line_that_is_made_up_for_later_is_found_too(pairs: list[tuple[str, str]]) -> None:
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    del sources[499], targets[1399]
    found = first_suspicious(zip(sources, targets, strict=True))
    assert found is not None
    assert abs(found - 500) <= 12


@pytest.mark.data
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("multi30k/train.en", "multi30k/train.de"),
        ("tatoeba-deen/train.de", "tatoeba-deen/train.en"),
        ("wmt-news-deen/newstest2013.de", "wmt-news-deen/newstest2013.en"),
        ("pydocs-enfr/train.en", "pydocs-enfr/train.fr"),
    ],
)
def test_a_line_missing_in_a_real_corpus_is_found(source: str, target: str) -> None:
    folder = Path(os.environ["MTKIT_DATA"])
    sources, targets = list(Lines(folder / source)), list(Lines(folder / target))
    assert first_suspicious(zip(sources, targets, strict=True)) is None
    for missing in range(100, 3000, 400):
        shorter = sources[: missing - 1] + sources[missing:]
        found = first_suspicious(zip(shorter, targets, strict=False))
        assert found is not None
        assert abs(found - missing) <= 12
