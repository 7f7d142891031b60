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
    names = ["1-10", "11-20", "41-60", "61-80", "161-240"]
    assert [(row.name, row.segments) for row in rows] == list(zip(names, (2, 2, 1, 1, 1), strict=True))
    assert [row.scores["exact"] for row in rows] == [100, 0, 0, 0, 100]
    assert [row.length_ratio for row in rows] == [1, 12 / 16, 2, 0, 1]
    for row, part in zip(rows, [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6), slice(6, 7)], strict=True):
        assert row.scores["BLEU"] == score_corpus(hypotheses[part], [references[part]], bootstrap=0)[0].value


def test_characters_are_the_words_of_scripts_without_spaces() -> None:
    texts = RIGHT["zh"] + RIGHT["ja"] + RIGHT["th"]
    (bleu,) = gather(named_metrics(["BLEU"]), texts, [texts])
    rows = by_length(texts, [bleu], bleu)
    assert [row.name for row in rows] == ["11-20", "21-30", "31-40"]


def test_every_length_falls_into_one_row() -> None:
    lengths = [*range(63), *(number + more for number in UPPER[5:] for more in (0, 1))]
    texts = [words(each) for each in lengths]
    (bleu,) = gather(named_metrics(["BLEU"]), texts, [texts])
    rows = by_length(texts, [bleu], bleu)
    assert sum(row.segments for row in rows) == len(lengths)
    names = ["0", "1-10", "11-20", "21-30", "31-40", "41-60", "61-80", "81-120", "121-160", "161-240", "241-320"]
    assert [row.name for row in rows] == [*names, "321-480", "481-640", "641-960", "over 960"]
    assert rows[0].length_ratio is None  # an empty source with an empty reference
    assert rows[0].scores == {"BLEU": 0}
