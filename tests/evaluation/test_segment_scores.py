"""Scores of other programs: naive means, scipy's exact tests, and a stand-in for comet-score."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.report import side_object, side_text
from mtkit.evaluation.segment_scores import check_files, comet_models, named_files
from mtkit.evaluation.side_scores import score_side
from mtkit.evaluation.systems import Translated

LINES = 12
SOURCES = [" ".join(["wort"] * (4 if line % 3 else 15)) for line in range(LINES)]
SCORES = [[0.5 + 0.3 * ((line * 7) % 12) / 12 for line in range(LINES)]]
SCORES.append([score + 0.02 * ((line * 5) % 7 - 2) for line, score in enumerate(SCORES[0])])

STAND_IN = """
import json, sys
arguments = sys.argv[1:]
read = lambda name: [line.strip() for line in open(name, encoding="utf-8").readlines()]
systems = arguments[arguments.index("-t") + 1 : arguments.index("--model")]
sources, references = (read(arguments[arguments.index(option) + 1]) for option in ("-s", "-r"))
score = lambda source, text, reference: 0.1 * len(source.split()) + (text == reference)
found = {name: [{"COMET": score(*row)} for row in zip(sources, read(name), references)] for name in systems}
json.dump(found, open(arguments[arguments.index("--to_json") + 1], "w"))
print("a line on standard output")
"""


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("source", SOURCES)
    write("reference", [f"line {line}" for line in range(LINES)])
    for number, scores in enumerate(SCORES):
        write(f"text{number}", [f"line {line if line % (number + 2) else 0}" for line in range(LINES)])
        write(f"scores{number}", list(map(repr, scores)))


def write(name: str, lines: list[str]) -> None:
    Path(name).write_text("".join(f"{line}\n" for line in lines), newline="")


def systems(count: int = 2) -> list[Translated]:
    return [
        Translated(f"text{number}", Path(f"text{number}"), (Path("reference"),), Path("source"))
        for number in range(count)
    ]


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    Path("stand_in.py").write_text(program)
    monkeypatch.setenv("MTKIT_COMET", f"{sys.executable} stand_in.py --gpus 0")


def test_a_score_is_the_mean_and_its_interval_is_of_resampled_means() -> None:
    side = score_side(None, systems(), metrics=(), segment_scores={"Mine": [Path("scores0"), Path("scores1")]})
    drawn = np.random.default_rng(12345).integers(0, LINES, size=(1000, LINES))
    for (score,), scores in zip(side.overall.scores, SCORES, strict=True):
        means = sorted(np.array(scores)[drawn].mean(axis=1))
        assert score.name == "Mine"
        assert score.value == pytest.approx(sum(scores) / LINES, rel=1e-12)
        assert (score.low, score.high) == pytest.approx((means[25], means[-26]), rel=1e-6)
        assert score.signature == "segments:mean|bs:1000|seed:12345"


@pytest.mark.parametrize("scale", [1.0, 1e-7, 1e4])
def test_the_paired_test_is_the_exact_permutation_test_at_any_scale(scale: float) -> None:
    for number, scores in enumerate(SCORES):
        write(f"scores{number}", [repr(score * scale) for score in scores])
    files = {"Mine": [Path("scores0"), Path("scores1")]}
    ((difference,),) = score_side(None, systems(), metrics=(), segment_scores=files).overall.differences

    def mean(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
        return (other - one).mean(axis=axis)

    exact = stats.permutation_test(SCORES, mean, permutation_type="samples", vectorized=True, n_resamples=np.inf)
    assert difference.value == pytest.approx(exact.statistic * scale)
    assert difference.randomisation_p == pytest.approx(exact.pvalue, abs=0.02)
    assert 0.02 < exact.pvalue < 0.5
    drawn = np.random.default_rng(12345).integers(0, LINES, size=(1000, LINES))
    gaps = np.subtract(*np.array(SCORES))[drawn].mean(axis=1)
    chances = sum(abs(gaps - gaps.mean()) >= abs(exact.statistic) - 1e-6)
    assert difference.bootstrap_p == pytest.approx((chances + 1) / 1001)


def test_other_metrics_lengths_and_tables_go_with_them() -> None:
    files = {"Mine": [Path("scores0"), Path("scores1")]}
    side = score_side(None, systems(), metrics=("exact",), segment_scores=files, lengths=True)
    assert [score.name for score in side.overall.scores[0]] == ["exact", "Mine"]
    short, long = side.lengths[1]
    assert (short.name, long.name) == ("1-10", "11-20")
    assert short.scores["Mine"] == pytest.approx(np.mean([s for line, s in enumerate(SCORES[1]) if line % 3]))
    assert long.scores["Mine"] == pytest.approx(np.mean(SCORES[1][::3]))
    text = side_text(side)
    assert f"{np.mean(SCORES[0]):.4f}" in text
    assert f"{np.mean(SCORES[1]) - np.mean(SCORES[0]):+.4f}" in text
    assert f"{long.scores['Mine']:.4f}" in text
    assert "58.33" in text  # exact match of the first system, in per cent: 2 decimals
    assert (
        json.loads(json.dumps(side_object(side)))["systems"][1]["scores"][1]["value"] == side.overall.scores[1][1].value
    )


def test_equal_systems_are_equal() -> None:
    files = {"Mine": [Path("scores0"), Path("scores0")]}
    ((difference,),) = score_side(None, systems(), metrics=(), segment_scores=files).overall.differences
    assert (difference.value, difference.bootstrap_p, difference.randomisation_p) == (0, 1, 1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0.5"] * 5 + ["", *["0.5"] * 6], r"scores0, line 6: '' is not a number"),
        (["0.5", "nan"] + ["0.5"] * 10, r"line 2: 'nan' is not a number"),
        (["-inf"] * 12, r"line 1: '-inf' is not a number"),
        (["score"] + ["0.5"] * 12, r"line 1: 'score' is not a number"),
        (["0.5"] * 11, r"scores0 has 11 scores and text0 has 12 lines"),
        ([], r"scores0 has 0 scores"),
    ],
)
def test_wrong_files_are_refused_by_line(lines: list[str], message: str) -> None:
    write("scores0", lines)
    with pytest.raises(DataError, match=message):
        score_side(None, systems(1), metrics=(), segment_scores={"Mine": [Path("scores0")]})


def test_files_belong_to_metrics_and_systems() -> None:
    files = named_files(["A=one", "B=x=y", "A=two"])
    assert files == {"A": [Path("one"), Path("two")], "B": [Path("x=y")]}
    with pytest.raises(MtkitError, match="--segment-scores B has 1 files for 2 systems"):
        check_files(files, 2, 1)
    with pytest.raises(MtkitError, match="one side, not 2; choose one with --side"):
        check_files({"A": [Path("one")]}, 1, 2)
    for wrong in ("A", "=one", "A="):
        with pytest.raises(MtkitError, match="is not NAME=FILE"):
            named_files([wrong])
    with pytest.raises(MtkitError, match="give the scores another name"):
        named_files(["bleu=one"])
    with pytest.raises(MtkitError, match="give the scores another name"):
        named_files(["BLEU =one"])


@pytest.mark.parametrize(
    ("name", "metric"), [("COMET", "comet"), ("comet", "COMET"), ("COMET:me/kiwi", "comet:me/kiwi")]
)
def test_segment_scores_and_comet_have_different_names(name: str, metric: str) -> None:
    with pytest.raises(MtkitError, match=f"--segment-scores {name}: --metric comet has the same name; give the scores"):
        score_side(None, systems(1), metrics=[metric], segment_scores={name: [Path("scores0")]})


def test_models_of_comet_are_among_the_metrics() -> None:
    assert comet_models(["BLEU", "COMET", "comet:me/kiwi", "comet"]) == (
        ["BLEU"],
        ["Unbabel/wmt22-comet-da", "me/kiwi"],
    )


def test_comet_scores_all_systems_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, STAND_IN)
    write("text0", ["line 0", "Zeile\rzwei", "line\u2028 2", *[f"line {line}" for line in range(3, LINES)]])
    side = score_side(None, systems(), metrics=("BLEU", "comet", "comet:me/kiwi"))
    assert [score.name for score in side.overall.scores[0]] == ["BLEU", "COMET", "COMET:me/kiwi"]
    words = [0.1 * len(source.split()) for source in SOURCES]
    right = [[line not in (1, 2) for line in range(LINES)], [line % 3 != 0 or line == 0 for line in range(LINES)]]
    for scores, hits in zip(side.overall.scores, right, strict=True):
        assert scores[1].value == pytest.approx(np.mean(words) + np.mean(hits))
        assert scores[1].signature == "model:Unbabel/wmt22-comet-da|segments:mean|bs:1000|seed:12345"
        assert scores[2].value == scores[1].value
    assert side.overall.differences[0][1].value == pytest.approx(np.mean(right[1]) - np.mean(right[0]))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit(3)", "failed with exit code 3"),
        ("", "failed with exit code 0"),
        (STAND_IN.replace('"COMET"', '"score"'), "no scores of segments"),
        (STAND_IN.replace("read(name)", "read(name)[1:]"), "did not write a number for each segment"),
        (STAND_IN.replace("0.1 *", "float('nan') *"), "did not write a number for each segment"),
    ],
)
def test_a_command_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, program: str, message: str) -> None:
    stand_in(monkeypatch, program)
    with pytest.raises(MtkitError, match=message):
        score_side(None, systems(1), metrics=["comet:m"])


def test_a_command_that_is_missing_is_an_error_before_anything_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTKIT_COMET", "/nowhere/comet-score --gpus 0")
    with pytest.raises(MtkitError, match=r"no command '/nowhere/comet-score'; install COMET in its own environment"):
        score_side(None, [Translated("x", Path("missing"), (Path("missing"),))], metrics=["comet:m"])
    monkeypatch.setenv("MTKIT_COMET", "source --gpus 0")  # no program
    Path("source").chmod(0o755)
    monkeypatch.setenv("PATH", ".")
    with pytest.raises(MtkitError, match="source"):
        score_side(None, systems(1), metrics=["comet:m"])


def test_a_command_with_an_open_quote_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTKIT_COMET", "'x")
    with pytest.raises(MtkitError, match=r"^MTKIT_COMET=.*: No closing quotation; correct the quotes$"):
        score_side(None, systems(1), metrics=["comet"])


def test_comet_needs_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, STAND_IN)
    with pytest.raises(MtkitError, match="give it with --source"):
        score_side(None, [Translated("x", Path("text0"), (Path("reference"),))], metrics=["comet:m"])
