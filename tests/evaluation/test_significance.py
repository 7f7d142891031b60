"""Whether systems differ: sacrebleu's randomisation test, to the last digit except for ties; a two-sided bootstrap."""

import random

import numpy as np
import pytest
from sacrebleu.significance import PairedTest

from mtkit.errors import MtkitError
from mtkit.evaluation.metrics import ALL_METRICS
from mtkit.evaluation.scores import named_metrics, score_corpus
from mtkit.evaluation.segment_scores import segment_means
from mtkit.evaluation.significance import compare_systems
from mtkit.evaluation.statistics import Statistics, gather, resample
from tests.evaluation.test_statistics import corpus

SEGMENTS = 90
SYSTEMS = {"a": corpus(SEGMENTS, 0.3), "b": corpus(SEGMENTS, 0.34, 2), "c": corpus(SEGMENTS, 0.5, 3)}


def statistics(references: list[list[str]]) -> list[list[Statistics]]:
    metrics = named_metrics(ALL_METRICS)
    return [gather(metrics, each, references) for each in SYSTEMS.values()]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("test", ["bootstrap", "randomisation"])
def test_differences_signatures_and_randomisation_are_sacrebleus(test: str, several: bool) -> None:
    references = [corpus(SEGMENTS, 0)] + ([corpus(SEGMENTS, 0.1, 9)] if several else [])
    kind, times = {"bootstrap": ("bs", 300), "randomisation": ("ar", 500)}[test]
    # sacrebleu's results are found by its scores' names
    signatures, expected = PairedTest(
        [*SYSTEMS.items()], {name: metric for name, (metric,) in named_metrics(ALL_METRICS)}, references, kind, times
    )()
    found = compare_systems(statistics(references), tests=[test], resamples=300, trials=500)
    surely: list[float] = []
    for system, differences in enumerate(found.differences, start=1):
        for difference in differences:
            theirs = expected["chrF2" if difference.metric == "chrF" else difference.metric]
            ours = difference.bootstrap_p if test == "bootstrap" else difference.randomisation_p
            assert difference.value == pytest.approx(theirs[system].score - theirs[0].score, abs=1e-12)
            if difference.value == 0:
                assert ours == 1
            else:
                assert ours is not None
                tied = difference.metric not in ("BLEU", "chrF")  # sacrebleu counts no ties
                if test == "randomisation":
                    assert ours >= theirs[system].p_value if tied else ours == theirs[system].p_value
                surely.append(ours)
            signature = signatures["chrF2" if difference.metric == "chrF" else difference.metric]
            assert difference.signature == signature.format()
    assert min(surely) < 0.01
    assert max(surely) > 0.05


def test_bootstrap_counts_both_tails() -> None:
    systems = statistics([corpus(SEGMENTS, 0)])
    resampled = resample(systems, 300)
    found = compare_systems(systems, tests=["bootstrap"], resamples=300)
    for system, differences in enumerate(found.differences, start=1):
        for number, difference in enumerate(differences):
            gaps = [b.score - a.score for a, b in zip(resampled[0][number], resampled[system][number], strict=True)]
            mean = sum(gaps) / len(gaps)
            extreme = sum(abs(gap - mean) >= abs(difference.value) - 1e-5 for gap in gaps)
            assert difference.bootstrap_p == (1 if difference.value == 0 else (extreme + 1) / 301)


def test_bootstrap_rejects_five_per_cent_of_equal_systems() -> None:
    draw, rejected = random.Random(5), 0
    for _ in range(200):
        systems = [
            [segment_means("rating", np.array([draw.gauss(50, 10) + draw.gauss(0, 5) for _ in range(60)]))]
            for _ in range(2)
        ]
        ((difference,),) = compare_systems(systems, tests=["bootstrap"], resamples=300).differences
        assert difference.bootstrap_p is not None
        rejected += difference.bootstrap_p < 0.05
    assert 0.02 <= rejected / 200 <= 0.09


def test_only_the_tests_asked_for_are_done() -> None:
    systems = statistics([corpus(SEGMENTS, 0)])[:2]
    (one,) = compare_systems(systems, tests=["bootstrap"], resamples=20, trials=20).differences
    (other,) = compare_systems(systems, tests=["randomisation"], resamples=20, trials=20).differences
    assert [each.randomisation_p for each in one] == [None] * len(ALL_METRICS) == [each.bootstrap_p for each in other]
    assert all("bs:20|seed" in each.signature for each in one)
    assert all("nrefs:1|ar:20|seed" in each.signature for each in other)
    with pytest.raises(MtkitError, match="did you mean 'bootstrap'"):
        compare_systems(systems, tests=["bootstrp"])


def test_the_scores_are_those_of_each_system_alone() -> None:
    references = [corpus(SEGMENTS, 0)]
    found = compare_systems(statistics(references), tests=["bootstrap"])
    for scores, hypotheses in zip(found.scores, SYSTEMS.values(), strict=True):
        assert scores == score_corpus(hypotheses, references, metrics=ALL_METRICS)


def test_equal_systems_do_not_differ() -> None:
    same = statistics([corpus(SEGMENTS, 0)])[:1] * 2
    for difference in compare_systems(same, resamples=50, trials=50).differences[0]:
        assert (difference.value, difference.bootstrap_p, difference.randomisation_p) == (0, 1, 1)


def test_systems_that_differ_in_few_segments_may_do_so_by_chance() -> None:
    references, metrics = [corpus(20, 0)], named_metrics(("exact",))
    right = references[0]
    for wins, losses, exact in ((1, 0, 1.0), (3, 0, 0.25), (14, 6, 0.115)):
        one = [*right[:wins], *["no"] * losses, *right[wins + losses :]]
        other = [*["no"] * wins, *right[wins : wins + losses], *right[wins + losses :]]
        systems = [gather(metrics, each, references) for each in (one, other)]
        ((difference,),) = compare_systems(systems, tests=["randomisation"], trials=4000).differences
        assert difference.randomisation_p == pytest.approx(exact, abs=0.03)


def test_one_system_has_nothing_to_differ_from() -> None:
    found = compare_systems(statistics([corpus(SEGMENTS, 0)])[:1], resamples=20, trials=20)
    assert found.differences == []
    assert len(found.scores) == 1
