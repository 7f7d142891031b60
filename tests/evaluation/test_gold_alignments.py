"""Alignment error rate, against values computed by hand and weights made by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtkit.decoding import forced
from mtkit.decoding.alignment_heads import Heads
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError
from mtkit.evaluation.gold_alignments import (
    GoldLinks,
    Link,
    compare_links,
    link_words,
    links_object,
    links_text,
    read_links,
    read_systems,
)
from mtkit.evaluation.significance import Comparison
from mtkit.runs import Run
from tests.decoding.trained import make_run

SURE, POSSIBLE = frozenset({(0, 0), (1, 1)}), frozenset({(2, 1)})
GOLD = [GoldLinks(SURE, SURE | POSSIBLE), GoldLinks(frozenset({(0, 0)}), frozenset({(0, 0)}))]


def values(comparison: Comparison, system: int = 0) -> list[float]:
    return [score.value for score in comparison.scores[system]]


def links_of(path: Path, text: str, lines: int | None = None, **how: Any) -> list[GoldLinks]:
    path.write_text(text)
    return read_links(path, lines, **how)


def test_rates_of_an_example_by_hand() -> None:
    """Line 1: A = {0-0, 2-1, 2-2}, A & S = {0-0}, A & P = {0-0, 2-1}. Line 2: A = S = {0-0}."""
    first: list[set[Link]] = [{(0, 0), (2, 1), (2, 2)}, set()]
    both: list[set[Link]] = [first[0], {(0, 0)}]
    assert values(compare_links(GOLD[:1], [first[:1]])) == pytest.approx([40, 200 / 3, 50])  # 1 - (1 + 2) / (3 + 2)
    assert values(compare_links(GOLD, [both])) == pytest.approx([100 * (1 - 5 / 7), 75, 200 / 3])
    assert values(compare_links(GOLD, [first])) == pytest.approx([50, 200 / 3, 100 / 3])
    perfect = [set(line.sure) for line in GOLD]
    assert values(compare_links(GOLD, [perfect])) == [0, 100, 100]
    assert values(compare_links(GOLD, [[set(line.possible) for line in GOLD]])) == [0, 100, 100]
    assert values(compare_links(GOLD, [[set(), set()]])) == [100, 0, 0]


def test_systems_are_compared_line_by_line() -> None:
    random = np.random.default_rng(3)
    gold, good, bad = [], list[set[Link]](), list[set[Link]]()
    for _ in range(60):
        sure = frozenset((word, word) for word in range(random.integers(2, 8)))
        gold.append(GoldLinks(sure, sure | {(0, 1)}))
        good.append({link for link in sure if random.random() < 0.9})
        bad.append({(source, target + int(random.random() < 0.5)) for source, target in sure})
    comparison = compare_links(gold, [good, bad])
    (error_rate, *_), (other, *_) = comparison.scores
    assert error_rate.low is not None
    assert other.high is not None
    assert error_rate.low < error_rate.value < other.value < other.high
    difference = comparison.differences[0][0]
    assert difference.value == pytest.approx(other.value - error_rate.value)
    assert difference.bootstrap_p is not None
    assert difference.bootstrap_p < 0.01
    assert difference.randomisation_p is not None
    assert difference.randomisation_p < 0.01
    shown = links_text("gold", ["one", "two"], gold, comparison)
    assert shown.startswith(f"gold: 60 lines, {sum(len(line.sure) for line in gold)} sure and 60 possible links")
    assert "difference: the AER minus the AER of one" in shown
    assert "p bootstrap" not in links_text("gold", ["one"], gold, compare_links(gold, [good]))
    content = json.loads(json.dumps(links_object("gold", ["one", "two"], gold, comparison)))
    assert [score["name"] for score in content["systems"][0]["scores"]] == ["AER", "precision", "recall"]
    assert content["systems"][1]["differences"][0]["value"] == difference.value


def test_pharaoh_links(tmp_path: Path) -> None:
    expected = [GoldLinks(SURE, SURE | POSSIBLE), GoldLinks(frozenset(), frozenset()), GOLD[1]]
    for text in ("0-0 1-1 2p1\n\n0-0\n", "0-0  2?1 1-1\r\n\r\n 0-0 0-0"):
        assert links_of(tmp_path / "gold", text) == expected
    assert links_of(tmp_path / "gold", "1-1 2-2 3p2\n\n1-1\n", one_based=True) == expected
    with pytest.raises(DataError, match="gold, line 2: 0-1 has a word 0; leave --one-based out"):
        links_of(tmp_path / "gold", "1-1\n0-1\n", one_based=True)
    with pytest.raises(DataError, match="gold has links of 3 lines, and there are 2 lines of text"):
        links_of(tmp_path / "gold", "0-0\n\n\n", 2)
    for wrong in ("0-", "0_0", "a-b", "0-0-0", "-1-0", "0-99999999999"):
        with pytest.raises(DataError, match=r"gold, line 1: .* is not a link such as 0-0"):
            links_of(tmp_path / "gold", f"{wrong}\n")


def test_naacl_links(tmp_path: Path) -> None:
    text = "0001 1 1 S\n0001 2 2\n1 3 2 P 0.5\n0003 1 1 S\n3 0 1 S\n"
    expected = [GoldLinks(SURE, SURE | POSSIBLE), GoldLinks(frozenset(), frozenset()), GOLD[1]]
    assert links_of(tmp_path / "gold", text) == expected
    assert links_of(tmp_path / "gold", text, 4) == [*expected, expected[1]]
    with pytest.raises(DataError, match="gold, line 4: there is no line 3 of text"):
        links_of(tmp_path / "gold", text, 2)
    for wrong in ("0 1 1", "1 1 1 X", "1 1", "0-0"):
        with pytest.raises(DataError, match="gold, line 6: "):
            links_of(tmp_path / "gold", f"{text}{wrong}\n")


def test_last_lines_without_gold_links_count(tmp_path: Path) -> None:
    """NAACL's form does not contain the number of lines."""
    paths = naacl, pharaoh, others = [tmp_path / name for name in ("naacl", "pharaoh", "others")]
    texts = "1 1 1 S\n1 2 2\n1 3 2 P\n", "0-0\n1-1\n", "3 1 1\n"
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    gold, (one, two) = read_systems(naacl, [pharaoh, pharaoh])
    assert gold == [GOLD[0], GoldLinks(frozenset(), frozenset())]
    assert one == two == [{(0, 0)}, {(1, 1)}]
    gold, (one,) = read_systems(naacl, [others])
    assert len(gold) == 3
    assert one == [set(), set(), {(0, 0)}]
    with pytest.raises(DataError, match="pharaoh has links of 2 lines, and there are 3 lines of text"):
        read_systems(naacl, [others, pharaoh])
    with pytest.raises(DataError, match="others, line 1: there is no line 3 of text"):
        read_systems(pharaoh, [others])


def test_a_file_without_links_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gold has no links"):
        links_of(tmp_path / "gold", "")
    with pytest.raises(DataError, match="no file"):
        read_links(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run")).run


def attend_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each target piece all its attention to the source piece of the same number, or to the last."""

    def weights(
        network: Any, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], *rest: Any
    ) -> dict[str, list[torch.Tensor]]:
        layer = torch.zeros(len(sources), 1, max(map(len, targets)), max(map(len, sources)))
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            for piece in range(len(target)):
                layer[row, 0, piece, min(piece, len(source) - 1)] = 1
        return {"cross": [layer]}

    monkeypatch.setattr(forced, "forced_weights", weights)


def test_words_of_given_translations_are_linked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    attend_in_order(monkeypatch)
    lines = ["The  dog sees a house", "", "A cat", "Old tree"]
    translations = [lines[0], "a", lines[2], ""]
    gold = [GoldLinks(frozenset(), frozenset({(4, 4)}))] + [GoldLinks(frozenset(), frozenset())] * 3
    found = link_words(Translator([run]), lines, translations, gold, heads=Heads())
    assert found == [{(word, word) for word in range(5)}, set(), {(0, 0), (1, 1)}, set()]


def test_words_are_those_that_were_annotated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chinese words between spaces, or each character if the gold links count these."""
    attend_in_order(monkeypatch)
    said: list[str] = []
    text, spaced, characters = ["中文 字 a"], frozenset({(2, 2)}), frozenset({(3, 3)})
    (found,) = link_words(Translator([run]), text, text, [GoldLinks(spaced, spaced)], heads=Heads(), say=said.append)
    assert found == {(0, 0), (1, 1), (2, 2)}
    assert not said
    (found,) = link_words(
        Translator([run]), text, text, [GoldLinks(characters, characters)], heads=Heads(), say=said.append
    )
    assert found == {(number, number) for number in range(4)}
    assert said == [
        f"each character of the {side} is a word, as its gold links count more words than there are between spaces"
        for side in ("source", "target")
    ]
    many = frozenset({(0, 4)})
    with pytest.raises(DataError, match=r"target line 1 has 4 words, and its gold links have a word 5 .*--one-based"):
        link_words(Translator([run]), text, text, [GoldLinks(many, many)], heads=Heads())


def test_texts_that_do_not_make_pairs_are_named(run: Run) -> None:
    gold = [GoldLinks(frozenset(), frozenset())]
    with pytest.raises(DataError, match="1 source lines and 2 target lines do not make pairs"):
        link_words(Translator([run]), ["a"], ["a", "b"], gold, heads=Heads())
    with pytest.raises(DataError, match="source line 1 has"):
        link_words(Translator([run]), ["dog " * 40], ["a"], gold, heads=Heads())
