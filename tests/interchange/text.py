"""Lines of English, German, Chinese and Japanese words, and lines that are hard to translate."""

import random

ENGLISH = [
    "the",
    "old",
    "dog",
    "sees",
    "a",
    "green",
    "house",
    "and",
    "the",
    "small",
    "cats",
    "are",
    "running",
    "under",
    "trees",
    "near",
    "one",
    "river",
]
OTHERS = [
    "犬",
    "が",
    "家",
    "を",
    "見る",
    "我们",
    "都",
    "喜欢",
    "狗",
    "和",
    "猫",
    "der",
    "alte",
    "Hund",
    "läuft",
    "unter",
    "einem",
    "Baum",
]


def sentences(words: list[str], count: int, seed: int) -> list[str]:
    """Random lines."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(2, 9))) + "." for _ in range(count)]


SOURCES = [
    *sentences(ENGLISH, 30, 7),
    "Two sentences. In one line!",
    "an unseen wörd ☃ and 漢字",
    "ｆｕｌｌ width",
    "  spaces   between  ",
    "line\u2028separator and\u00a0space",
    "犬 dog",
]
"""Lines to translate: known words, unknown characters, several sentences, other spaces."""
