"""Scores: the sacrebleu command's, to the last digit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.scores import Score, score_corpus
from mtkit.evaluation.side_scores import score_side
from mtkit.evaluation.systems import Translated

REFERENCES = [
    "Der alte Hund sieht ein kleines Haus.",
    "Zwei Vögel, die singen, sitzen im Baum!",
    "Es kostet 3,50 € (nicht viel).",
    "Sie sagte: \u201eNein.\u201c",
    "Das ist alles \u2028 was bleibt \x85 hier.",
]
OTHERS = [
    "Ein alter Hund sieht das kleine Haus.",
    "Im Baum sitzen zwei singende Vögel!",
    "Es kostet 3,50 Euro, das ist nicht viel.",
    "Sie sagte: \u201eNein.\u201c",
    "Das ist alles, was hier bleibt.",
]
HYPOTHESES = [
    "Der alte Hund sieht ein Haus .",
    "zwei Vögel sitzen im Baum!",
    "Es kostet 3,50 € (viel). ",
    "",
    "Das ist alles was bleibt hier.",
]


def written(folder: Path, name: str, lines: list[str]) -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), newline="\n")
    return path


def score_files(hypothesis: Path, references: list[Path], *, lowercase: bool = False) -> list[Score]:
    """The scores of files, as `mtkit score` gives them."""
    return score_side(None, [Translated("one", hypothesis, tuple(references))], lowercase=lowercase).overall.scores[0]


def sacrebleu(hypothesis: Path, references: list[Path], *options: str) -> dict[str, dict[str, object]]:
    """What the sacrebleu command prints, by metric."""
    command = [
        sys.executable,
        "-m",
        "sacrebleu",
        *map(str, references),
        "-i",
        str(hypothesis),
        "-f",
        "json",
        "-w",
        "12",
    ]
    done = subprocess.run([*command, "-m", "bleu", "chrf", "ter", *options], capture_output=True, text=True, check=True)
    return {each["name"]: each for each in json.loads(done.stdout)}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("lowercase", [False, True])
def test_values_intervals_and_signatures_are_the_sacrebleu_commands(
    tmp_path: Path, several: bool, lowercase: bool
) -> None:
    hypothesis = written(tmp_path, "hypothesis", HYPOTHESES * 4)
    references = [written(tmp_path, "reference", REFERENCES * 4)]
    references += [written(tmp_path, "other", OTHERS * 4)] if several else []
    options = ["-lc", "--chrf-lowercase"] if lowercase else []
    expected = sacrebleu(hypothesis, references, "--confidence", *options)
    found = score_files(hypothesis, references, lowercase=lowercase)
    assert [score.name for score in found] == ["BLEU", "chrF", "TER"]
    for score in found:
        theirs = expected["chrF2" if score.name == "chrF" else score.name]
        assert score.low is not None
        assert score.high is not None
        assert score.value == pytest.approx(theirs["score"], abs=1e-11)
        assert (score.high - score.low) / 2 == pytest.approx(theirs["confidence_var"], abs=1e-11)
        assert score.signature == theirs["signature"]
        assert 0 < score.low < score.high


def test_without_resampling_the_value_is_the_same_and_there_is_no_interval() -> None:
    for quick, full in zip(
        score_corpus(HYPOTHESES, [REFERENCES], bootstrap=0), score_corpus(HYPOTHESES, [REFERENCES]), strict=True
    ):
        assert quick.value == full.value
        assert (quick.low, quick.high) == (None, None)


@pytest.mark.parametrize("wrong", [1, 2, 5])
def test_intervals_stay_within_what_a_metric_can_be(wrong: int) -> None:
    """A few bad segments among perfect ones: the resamples are skewed, and their mean lies far from their middle."""
    references = [f"Satz Nummer {number} ist ganz einfach." for number in range(200)]
    hypotheses = ["Falsch" if number < wrong else line for number, line in enumerate(references)]
    for score in score_corpus(hypotheses, [references], metrics=("BLEU", "chrF", "TER", "exact")):
        assert score.low is not None
        assert score.high is not None
        assert 0 <= score.low <= score.value <= score.high <= 100.0001  # sacrebleu's own rounding


def test_metrics_and_tokenizers_are_chosen_by_name() -> None:
    (plain,) = score_corpus(HYPOTHESES, [REFERENCES], metrics=["BLEU"], bootstrap=0)
    (characters,) = score_corpus(HYPOTHESES, [REFERENCES], metrics=["BLEU"], bootstrap=0, tokenize="char")
    assert "tok:13a" in plain.signature
    assert "tok:char" in characters.signature
    assert characters.value > plain.value
    with pytest.raises(MtkitError, match="did you mean 'char'"):
        score_corpus(HYPOTHESES, [REFERENCES], tokenize="chars")


@pytest.mark.parametrize("language", ["de", "zh", "th"])
def test_where_most_references_are_empty_there_are_intervals_all_the_same(language: str) -> None:
    """Some resamples have empty references alone."""
    for score in score_corpus(["a b", "", "c"], [["a d", "", ""]], languages=[language] * 3):
        assert score.low is not None
        assert score.low <= score.value


def test_a_perfect_translation_gets_all() -> None:
    bleu, chrf, ter = score_corpus(REFERENCES, [OTHERS, REFERENCES], bootstrap=0)
    assert bleu.value == pytest.approx(100)
    assert chrf.value == pytest.approx(100)
    assert ter.value == 0


def test_unequal_numbers_of_lines_are_refused_with_both(tmp_path: Path) -> None:
    short, long = written(tmp_path, "short", HYPOTHESES[:3]), written(tmp_path, "long", REFERENCES)
    with pytest.raises(DataError, match=r"short has 3 lines and .*long has 5"):
        score_files(short, [long])
    with pytest.raises(DataError, match="hypothesis has 3 lines and reference 2 has 5"):
        score_corpus(HYPOTHESES[:3], [REFERENCES[:3], REFERENCES])
    with pytest.raises(DataError, match="the hypothesis has no reference"):
        score_corpus(["a"], [])
    with pytest.raises(DataError, match="has no lines"):
        score_corpus([], [[]])


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    lines = ["a b c d\u2028e f", "g h i j\x85k", "l m\x0b n o p"]
    path = written(tmp_path, "lines", lines)
    assert score_files(path, [path])[0].value == pytest.approx(100)
    path.write_text("a b c d e")  # no newline at the end
    assert score_files(path, [path])[0].value == pytest.approx(100)


def test_metrics_are_one_name_or_any_that_can_be_gone_through() -> None:
    wanted = score_corpus(HYPOTHESES, [REFERENCES], metrics=["BLEU"], bootstrap=0)
    for given in ("BLEU", "bleu", (name for name in ["BLEU"]), {"BLEU"}):
        assert score_corpus(HYPOTHESES, [REFERENCES], metrics=given, bootstrap=0) == wanted
    for nothing in ([], iter(())):
        with pytest.raises(MtkitError, match="no metrics; choose one or several of: BLEU, chrF, TER, exact"):
            score_corpus(HYPOTHESES, [REFERENCES], metrics=nothing)


@pytest.mark.parametrize("number", [1, -1])
def test_resamples_that_give_no_interval_are_refused(number: int) -> None:
    with pytest.raises(MtkitError, match=f"^bootstrap = {number} gives no interval; set 1000, or 0 for no intervals"):
        score_corpus(HYPOTHESES, [REFERENCES], bootstrap=number)
