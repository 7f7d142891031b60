"""Scores by the length of the source."""

from mtkit.evaluation.scores import named_metrics, score_corpus
from mtkit.evaluation.statistics import UPPER, by_length, gather
from tests.evaluation.unspaced import RIGHT


def words(count: int, word: str = "w") -> str:
    return " ".join(f"{word}{number}" for number in range(count))


def test_each_length_has_the_scores_of_its_segments() -> None:
    sources = [words(each) for each in (1, 10, 11, 20, 60, 61, 200)]
    references = [words(8, "r")] * 7
    hypotheses = [words(8, "r"), words(8, "r"), words(8, "x"), words(4, "r"), words(16, "r"), "", words(8, "r")]
    statistics = gather(named_metrics(["BLEU", "exact"]), hypotheses, [references])
    rows = by_length(sources, statistics, statistics[0])
    assert [(row.name, row.segments) for row in rows] == [("1-10", 2), ("11-20", 2), ("41-60", 1), ("over 60", 2)]
    assert [row.scores["exact"] for row in rows] == [100, 0, 0, 50]
    assert [row.length_ratio for row in rows] == [1, 12 / 16, 2, 0.5]
    for row, part in zip(rows, [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 7)], strict=True):
        assert row.scores["BLEU"] == score_corpus(hypotheses[part], [references[part]], bootstrap=0)[0].value


def test_characters_are_the_words_of_scripts_without_spaces() -> None:
    texts = RIGHT["zh"] + RIGHT["ja"] + RIGHT["th"]
    (bleu,) = gather(named_metrics(["BLEU"]), texts, [texts])
    rows = by_length(texts, [bleu], bleu)
    assert [row.name for row in rows] == ["11-20", "21-30", "31-40"]


def test_every_length_falls_into_one_row() -> None:
    lengths = range(max(UPPER) + 3)
    texts = [words(each) for each in lengths]
    (bleu,) = gather(named_metrics(["BLEU"]), texts, [texts])
    rows = by_length(texts, [bleu], bleu)
    assert sum(row.segments for row in rows) == len(lengths)
    assert [row.name for row in rows] == ["0", "1-10", "11-20", "21-30", "31-40", "41-60", "over 60"]
    assert rows[0].length_ratio is None  # an empty source with an empty reference
    assert rows[0].scores == {"BLEU": 0}
