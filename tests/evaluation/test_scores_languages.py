"""Text is cut as its language is written: what is right has 100, what is nearly right something in between."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sacrebleu.metrics import BLEU

from mtkit.errors import MtkitError
from mtkit.evaluation import metrics
from mtkit.evaluation.metrics import make_metric, missing_tokenizer
from mtkit.evaluation.scores import doubt, score_corpus
from mtkit.evaluation.side_scores import score_side
from mtkit.evaluation.systems import Translated
from mtkit.text.languages import installed_tokenizer
from tests.evaluation.test_systems import written
from tests.evaluation.unspaced import ENGLISH, RIGHT, WRONG


@pytest.mark.parametrize("language", RIGHT)
def test_right_is_100_and_nearly_right_is_in_between(language: str) -> None:
    right, languages = RIGHT[language], [language] * 4
    bleu, chrf, ter = score_corpus(right, [right], bootstrap=0, languages=languages)
    assert (bleu.value, chrf.value, ter.value) == (pytest.approx(100), pytest.approx(100), 0)
    bleu, chrf, ter = score_corpus(WRONG[language], [right], bootstrap=0, languages=languages)
    for score in (bleu, chrf, ter):
        assert 10 < score.value < 90


@pytest.mark.parametrize(
    ("language", "options"),
    [
        ("zh-TW", ["--tokenize", "zh", "--ter-normalized", "--ter-asian-support"]),
        ("ja", ["--tokenize", installed_tokenizer("ja"), "--ter-normalized", "--ter-asian-support"]),
        ("ko", ["--tokenize", installed_tokenizer("ko")]),
    ],
)
def test_the_scores_are_those_of_the_sacrebleu_command(tmp_path: Path, language: str, options: list[str]) -> None:
    right, wrong = RIGHT.get(language[:2], ENGLISH), WRONG.get(language[:2], ENGLISH[::-1])
    paths = [written(tmp_path / name, lines) for name, lines in (("right", right), ("wrong", wrong))]
    command = [sys.executable, "-m", "sacrebleu", str(paths[0]), "-i", str(paths[1]), "-m", "bleu", "ter", "-w", "9"]
    shown = subprocess.run([*command, "-f", "text", *options], capture_output=True, text=True, check=True).stdout
    for score in score_corpus(wrong, [right], metrics=["BLEU", "TER"], bootstrap=0, languages=[language] * 4):
        assert f"{score.name}|{score.signature} = {score.value:.9f}" in shown


def test_a_tokenizer_given_by_name_wins() -> None:
    (score,) = score_corpus(
        RIGHT["zh"], [RIGHT["zh"]], metrics=["BLEU"], bootstrap=0, languages=["zh"] * 4, tokenize="13a"
    )
    assert "tok:13a" in score.signature
    assert score.value < 0.5


def test_lines_in_several_languages_are_each_cut_as_their_own() -> None:
    right = [line for pair in zip(ENGLISH, RIGHT["zh"], strict=True) for line in pair]
    wrong = [line for pair in zip(ENGLISH, WRONG["zh"], strict=True) for line in pair]
    languages = ["de", "zh"] * 4
    bleu, chrf, ter = score_corpus(wrong, [right], languages=languages)
    assert "|tok:13a+zh|" in bleu.signature
    assert "|norm:no+yes|" in ter.signature
    assert "|asian:no+yes|" in ter.signature
    assert "+" not in chrf.signature
    assert bleu.low is not None
    assert bleu.low < bleu.value < 100
    alone = BLEU(tokenize="zh").corpus_score(WRONG["zh"], [RIGHT["zh"]]), BLEU().corpus_score(ENGLISH, [ENGLISH])
    sums = [
        [a + b for a, b in zip(*pair, strict=True)] for pair in zip(*((e.counts, e.totals) for e in alone), strict=True)
    ]
    assert (
        bleu.value
        == BLEU.compute_bleu(
            *sums, sum(each.sys_len for each in alone), sum(each.ref_len for each in alone), smooth_method="exp"
        ).score
    )
    same = score_corpus(ENGLISH, [ENGLISH[::-1]], languages=["de", "fr", "de", "fr"])
    assert same == score_corpus(ENGLISH, [ENGLISH[::-1]])


def test_a_side_of_several_directions_has_each_with_its_own_tokenizer(tmp_path: Path) -> None:
    ways, right, wrong = ["en-zh", "fr-en"] * 4, [], []
    for number, english in enumerate(ENGLISH):
        right += [RIGHT["zh"][number], english]
        wrong += [WRONG["zh"][number], english]
    texts = {"right": right, "wrong": wrong, "ways": ways}
    paths = {name: written(tmp_path / name, lines) for name, lines in texts.items()}
    files = [Translated(name, paths[name], (paths["right"],), None, paths["ways"]) for name in ("wrong", "right")]
    found = score_side("test", files, metrics=["BLEU", "TER"])
    assert found.overall.scores[0] == score_corpus(wrong, [right], metrics=["BLEU", "TER"], languages=["zh", "en"] * 4)
    assert found.overall.scores[1][0].value == pytest.approx(100)
    assert "|tok:zh+13a|" in found.overall.differences[0][0].signature
    _, chinese = found.directions["en-zh"]
    assert chinese.scores[0] == score_corpus(WRONG["zh"], [RIGHT["zh"]], metrics=["BLEU", "TER"], languages=["zh"] * 4)
    assert "|tok:zh|" in chinese.differences[0][0].signature
    assert "|tok:13a|" in found.directions["fr-en"][1].scores[0][0].signature
    told = score_side("test", files, metrics=["BLEU"], language="zh")
    assert "|tok:zh|" in told.overall.scores[0][0].signature


def test_bleu_of_words_that_are_none_is_doubted(tmp_path: Path) -> None:
    right, wrong = RIGHT["zh"], WRONG["zh"]
    scores = score_corpus(wrong, [right], bootstrap=0)
    told = doubt(scores, wrong, [right])
    assert told is not None
    assert told.startswith("BLEU 0.00 but chrF ")
    for word in ("tokenizer 13a", "--tokenize", "scoring.tokenize", "--target-language"):
        assert word in told
    assert doubt(scores[1:], wrong, [right]) is None  # no BLEU was asked for
    assert doubt(score_corpus(wrong, [right], bootstrap=0, languages=["zh"] * 4), wrong, [right]) is None
    nothing = ["x"] * 4
    assert doubt(score_corpus(nothing, [right], bootstrap=0), nothing, [right]) is None
    short = ["Good morning.", "thanks", "", "a red cat"]
    scores = score_corpus(short, [short], bootstrap=0)
    assert scores[0].value == 0  # no 4-grams
    assert doubt(scores, short, [short]) is None
    paths = [written(tmp_path / name, lines) for name, lines in (("right", right), ("wrong", wrong))]
    files = [Translated("one", paths[1], (paths[0],))]
    (note,) = score_side(None, files, language="de").notes
    assert note.startswith(f"{paths[0]} has no spaces between words")
    assert score_side(None, files, metrics=["chrF"], language="de").notes == []
    assert score_side(None, files).overall == score_side(None, files, language="zh").overall
    assert score_side(None, files, language="zh").notes == []


class _Missing(BLEU):  # type: ignore[misc]
    def __init__(self, tokenize: str | None = None, **how: object) -> None:
        if str(tokenize).endswith("mecab"):
            raise RuntimeError("\nJapanese tokenization requires extra dependencies")
        super().__init__(tokenize=tokenize, **how)


class _There(BLEU):  # type: ignore[misc]
    def __init__(self, tokenize: str | None = None, **how: object) -> None:
        super().__init__(tokenize="zh" if str(tokenize).endswith("mecab") else tokenize, **how)


@pytest.fixture
def _forgotten() -> Iterator[None]:
    installed_tokenizer.cache_clear()
    yield
    installed_tokenizer.cache_clear()


@pytest.mark.usefixtures("_forgotten")
def test_without_its_dictionary_a_language_is_scored_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "BLEU", _Missing)
    monkeypatch.setattr("sacrebleu.metrics.BLEU", _Missing)
    assert installed_tokenizer("ja") == installed_tokenizer("kor_Hang") == "char"
    assert installed_tokenizer("zh") == "zh"
    told = missing_tokenizer(["de", "ja"])
    assert told == (
        "BLEU counts characters in ja: its tokenizer ja-mecab is not installed; pip install 'sacrebleu[ja]'"
    )
    with pytest.raises(MtkitError, match=r"'ko-mecab' here: .*; pip install 'sacrebleu\[ko\]'"):
        make_metric("BLEU", tokenize="ko-mecab")
    assert missing_tokenizer(["ja"], "char") is missing_tokenizer(["de", "zh", "th", None]) is None
    (score,) = score_corpus(WRONG["ja"], [RIGHT["ja"]], metrics=["BLEU"], bootstrap=0, languages=["ja"] * 4)
    assert "|tok:char|" in score.signature


@pytest.mark.usefixtures("_forgotten")
def test_with_its_dictionary_a_language_has_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sacrebleu.metrics.BLEU", _There)
    assert installed_tokenizer("ja") == "ja-mecab"
    assert missing_tokenizer(["ja", "ko"]) is None
