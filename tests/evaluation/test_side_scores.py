"""All scores of one side."""

from pathlib import Path

import pytest

from mtkit.evaluation.scores import score_corpus
from mtkit.evaluation.side_scores import score_side
from mtkit.evaluation.systems import Translated
from tests.evaluation.test_statistics import corpus
from tests.evaluation.test_systems import written

SEGMENTS = 40
WAYS = ["en-fr", "en-de", "en-de", "en-fr"] * 10


@pytest.fixture
def files(tmp_path: Path) -> list[Translated]:
    texts = {"reference": corpus(SEGMENTS, 0), "a": corpus(SEGMENTS, 0.2), "b": corpus(SEGMENTS, 0.3, 2), "way": WAYS}
    paths = {name: written(tmp_path / name, lines) for name, lines in texts.items()}
    source = paths["reference"]
    return [Translated(name, paths[name], (paths["reference"],), source, paths["way"]) for name in ("a", "b")]


def test_each_direction_has_the_scores_of_its_segments(files: list[Translated]) -> None:
    found = score_side("test", files, metrics=["BLEU", "exact"], tests=["bootstrap"])
    assert list(found.directions) == ["en-fr", "en-de"]
    for way, (segments, comparison) in found.directions.items():
        assert segments == 20
        rows = [number for number in range(SEGMENTS) if WAYS[number] == way]
        references = [corpus(SEGMENTS, 0)[row] for row in rows]
        for scores, text in zip(comparison.scores, (corpus(SEGMENTS, 0.2), corpus(SEGMENTS, 0.3, 2)), strict=True):
            assert scores == score_corpus([text[row] for row in rows], [references], metrics=["BLEU", "exact"])
        assert len(comparison.differences[0]) == 2


def test_a_single_direction_is_no_table_of_its_own(files: list[Translated]) -> None:
    assert files[0].direction is not None
    written(files[0].direction, ["en-de"] * SEGMENTS)
    assert score_side("test", files[:1], metrics=["exact"]).directions == {}


def test_lengths_come_when_asked_for_with_or_without_bleu(files: list[Translated]) -> None:
    assert score_side("test", files[:1], metrics=["exact"]).lengths == []
    with_bleu = score_side("test", files, metrics=["BLEU"], tests=["bootstrap"], lengths=True)
    without = score_side("test", files, metrics=["exact"], tests=["bootstrap"], lengths=True)
    assert [[row.length_ratio for row in rows] for rows in with_bleu.lengths] == [
        [row.length_ratio for row in rows] for rows in without.lengths
    ]
    assert [set(row.scores) for row in without.lengths[1]] == [{"exact"}] * len(without.lengths[1])
    assert sum(row.segments for row in without.lengths[0]) == SEGMENTS


def test_text_that_looks_tokenised_is_named(files: list[Translated]) -> None:
    assert score_side("test", files, metrics=["exact"], tests=["bootstrap"]).notes == []
    written(files[1].hypothesis, [line.replace(".", " .") for line in corpus(SEGMENTS, 0)])
    found = score_side("test", files, metrics=["exact"], tests=["bootstrap"])
    (note,) = found.notes
    assert f"lines of {files[1].hypothesis} end in ' .'" in note


def test_directions_are_compared_by_the_tests_that_were_asked_for(files: list[Translated]) -> None:
    found = score_side("test", files, metrics=["exact"], tests=["bootstrap"])
    for comparison in (found.overall, *(each for _, each in found.directions.values())):
        ((difference,),) = comparison.differences
        assert difference.bootstrap_p is not None
        assert difference.randomisation_p is None
