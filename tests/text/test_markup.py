"""Inline tags: taken out, put back by links, each once and nested."""

import random
import re
from html.parser import HTMLParser
from time import process_time
from typing import Any

import pytest

from mtkit.text.markup import Token, _tokens, build, parse, partners
from mtkit.text.tag_placement import restore

Links = list[tuple[int, int]]


def links(text: str) -> Links:
    return [(int(one), int(other)) for one, other in (pair.split("-") for pair in text.split())]


@pytest.mark.parametrize(
    ("line", "target", "by", "expected"),
    [
        ("", "", "", ""),
        ("<b></b>", "", "", "<b></b>"),
        ("no tags & 1 < 2", "a & b < c", "0-0", "a &amp; b &lt; c"),
        ("a &amp; b", "a & b", "0-0 1-1 2-2", "a &amp; b"),
        (
            "The <b>red house</b>, <i>old</i>.",
            "Das rote Haus, alt.",
            "0-0 1-1 2-2 3-3",
            "Das <b>rote Haus</b>, <i>alt</i>.",
        ),
        ("<b>red <i>house</i></b> me", "ich Haus rot", "0-2 1-1 2-0", "ich <b><i>Haus</i> rot</b>"),
        ("<b>a</b> <i>b c</i>", "C A B", "0-1 1-2 2-0", "<i>C</i> <b>A</b> B"),
        ("a <br/>b<img src='x>y'>", "B A", "0-1 1-0", "B <img src='x>y'>A<br/>"),
        ('Hi {name}, %s <x id="1"/>', "Hallo Namen, s", "0-0 1-1 2-2", 'Hallo {name}, %s<x id="1"/>'),
        ("100%sûr %s는", "ganz x", "0-0 1-1", "ganz %s"),
        ("%sは水", "has s water", "0-1 2-2", "has %s water"),
        (
            '<span translate="no">Foo <b>&amp;</b></span> x',
            "X fu und",
            "0-1 1-2 2-0",
            'X <span translate="no">Foo <b>&amp;</b></span>',
        ),
        ("I <b>love</b> you", "我爱你。", "0-0 1-1 2-2", "我<b>爱</b>你。"),
        ("<b>a</b> b", "A B", "", "<b></b>A B"),
        ("a<br>b <!-- <b> -->", "a b", "0-0 1-1", "a <br>b<!-- <b> -->"),
        ("<b>लड़की</b>।", "लड़की।", "0-0", "<b>लड़की</b>।"),
    ],
)
def test_tags_enclose_the_words_that_are_linked_to_theirs(line: str, target: str, by: str, expected: str) -> None:
    marked = parse(line)
    assert marked.is_nested
    assert restore(marked, target, links(by)) == expected


@pytest.mark.parametrize(
    ("line", "target", "by", "expected"),
    [
        ("Hi {name}, you", "Hallo Name, du", "1-0 1-1 1-2", "{name} Hallo Name, du"),
        ("I see %s", "s da sehe s", "2-0 1-1 2-3", "%s da sehe s"),
        ("I see {x} and {x}", "x und y z", "2-0 2-1 3-2", "{x} x und y {x} z"),
        ("Hi {name}", "Oh „Name“!", "0-0 1-1", "Oh „{name}“!"),
        ("({name}) x", "(Name) x", "0-0 1-1", "({name}) x"),
        ("At http://{host}/x", "Bei http://Wirt/x", "0-0 1-1", "Bei http://{host}/x"),
        ("{first}/{last} x", "Erst/Letzt x", "0-0 1-1", "{first} {last} Erst/Letzt x"),
        ("{n}/{m} <b>{n} x</b>", "{n}/{m} {n} x", "2-2 2-0", "{n}/{m} <b>{n} x</b>"),
        ("{name}'s dog", "Names Hund", "0-0 1-1", "{name}s Hund"),
        ("a {name} b", "A B", "0-0 2-1", "A {name} B"),
        ("你好{name}。", "Hi {name}.", "0-0 3-1", "Hi {name}."),
        ("Hi, {user}!", "你好，用户！", "0-0 0-1 0-2 1-3 1-4 1-5", "你好，{user}！"),
        ('<i translate="no">Big Ben</i> is old', "Alt", "0-0 2-0", '<i translate="no">Big Ben</i>'),
        ('<i translate="no">Ben</i> is old', "Ben ist alt", "0-0 0-1 0-2", '<i translate="no">Ben</i> Ben ist alt'),
    ],
)
def test_what_stays_replaces_its_copy_or_a_fair_share_of_words(line: str, target: str, by: str, expected: str) -> None:
    assert restore(parse(line), target, links(by)) == expected


@pytest.mark.parametrize("line", ["<b>a <i>b</b> c</i>", "a</b>", "<p>a", "<b>a <i>b</b>"])
def test_tags_that_are_not_nested_are_reported_and_stay(line: str) -> None:
    marked = parse(line)
    assert not marked.is_nested
    restored = restore(marked, "A B C", [(0, 0), (1, 2), (2, 1)])
    assert sorted(re.findall("<.*?>", restored)) == sorted(re.findall("<.*?>", line))
    assert re.sub("<.*?>", "", restored) == "A B C"


class Nesting(HTMLParser):
    """The paths of a text's elements; an end tag that closes another element is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.paths: list[str] = []
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.stack.append(str(dict(attrs)["id"]))
        self.paths.append("/".join(self.stack))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.paths.append("/".join([*self.stack, str(dict(attrs)["id"])]))

    def handle_endtag(self, tag: str) -> None:
        self.stack.pop()


def random_line(draw: random.Random, words: list[str], depth: int = 0) -> str:
    """Words in random elements, each with its own id."""
    text = ""
    while words and draw.random() > 0.1 * depth:
        kind, number = draw.random(), draw.randrange(10**9)
        if kind < 0.15:
            text += f"<x id='{number}'/>"
        elif kind < 0.4 and depth < 3:
            text += f"<b id='{number}'>{random_line(draw, words, depth + 1)}</b>"
        else:
            text += draw.choice(["", " ", " "]) + words.pop()
    return text


def test_random_lines_keep_every_tag_nested_and_all_of_the_target() -> None:
    draw = random.Random(1)
    for _ in range(500):
        line = random_line(draw, [draw.choice(["ab", "c,", "我", "d."]) for _ in range(draw.randint(0, 9))])
        marked = parse(line)
        assert marked.is_nested
        target = " ".join(draw.choice(["x", "y,", "你", "(z)"]) for _ in range(draw.randint(0, 9)))
        by = [(draw.randrange(9), draw.randrange(9)) for _ in range(draw.randint(0, 12))]
        restored = restore(marked, target, by)
        assert sorted(Nesting(restored).paths) == sorted(Nesting(line).paths)
        assert re.sub("<.*?>", "", restored) == target


class Counted(list[Token]):
    """Tokens that count how many of them are read by index."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "line",
    [
        "<b>" * 1000 + "x" + "</i>" * 1000,
        "<b>" * 1000 + "x" + "</b>" * 1000,
        "<b translate=no>" * 1000 + "x" + "</b>" * 1000,
    ],
)
def test_the_work_grows_with_the_tags_not_with_their_square(line: str) -> None:
    for work in (partners, build):
        tokens = Counted(_tokens(line))
        work(tokens)
        assert tokens.read <= 5 * len(tokens)


@pytest.mark.parametrize("line", ["<!--" * 40_000, "--> " + "<!-- " * 40_000, "<" + "a" * 60_000])
def test_a_line_of_tags_that_never_end_is_read_once(line: str) -> None:
    start = process_time()
    assert parse(line).text == line
    assert process_time() - start < 5  # a search from each <!-- to the end took half a minute


def test_a_comment_is_a_tag_up_to_its_first_end() -> None:
    marked = parse('a <!-- <b> <!-- --> b <i title="-->">c</i> <!-- d')
    assert [element.opening for element in marked.elements] == ["<!-- <b> <!-- -->", '<i title="-->">']
    assert marked.text == "a  b c <!-- d"
