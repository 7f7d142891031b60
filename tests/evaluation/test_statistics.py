"""Resampling in blocks: sacrebleu's numbers, in bounded memory."""

import random
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from mtkit.errors import MtkitError
from mtkit.evaluation import statistics
from mtkit.evaluation.metrics import ALL_METRICS
from mtkit.evaluation.scores import named_metrics, score_corpus
from mtkit.evaluation.statistics import Statistics, gather, resample, resampled_values, shuffle


def corpus(segments: int, noise: float, seed: int = 1) -> list[str]:
    """Sentences of which the same words are drawn for every `noise`, and a share of them replaced."""
    words, spoil = random.Random(7), random.Random(seed)
    text = [[f"w{words.randrange(40)}" for _ in range(words.randint(1, 12))] for _ in range(segments)]
    return [" ".join("oh" if spoil.random() < noise else word for word in line) + "." for line in text]


def of(hypotheses: list[str], names: Iterable[str] = ALL_METRICS) -> list[Statistics]:
    return gather(named_metrics(tuple(names)), hypotheses, [corpus(len(hypotheses), 0)])


def test_any_selection_has_the_score_of_its_segments() -> None:
    hypotheses, references = corpus(60, 0.3), corpus(60, 0)
    chosen = np.arange(60) % 3 == 1
    part = [hypotheses[number] for number in range(60) if chosen[number]]
    expected = score_corpus(
        part, [[references[number] for number in range(60) if chosen[number]]], metrics=ALL_METRICS, bootstrap=0
    )
    for each, score in zip(of(hypotheses), expected, strict=True):
        assert each.result(chosen).score == score.value
        assert each.of(chosen).result().score == score.value


def test_the_size_of_the_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    systems = [of(corpus(45, 0.3)), of(corpus(45, 0.4, 2))]

    def draws() -> tuple[Any, Any]:
        resampled = resample(systems, 50)
        return [[[each.score for each in metric] for metric in system] for system in resampled], shuffle(
            systems[0], systems[1:], 300
        )

    whole = draws()
    monkeypatch.setattr(statistics, "BLOCK", 64)
    monkeypatch.setattr(statistics, "SEGMENTS", 7)
    in_blocks = draws()
    assert in_blocks[0] == whole[0]
    for one, other in zip(in_blocks[1][0], whole[1][0], strict=True):
        np.testing.assert_array_equal(one, other)
    for small, large in zip(of(corpus(45, 0.3)), systems[0], strict=True):
        np.testing.assert_array_equal(small.rows, large.rows)


@pytest.mark.parametrize("seed", ["abc", "-1", "1.5", ""])
def test_a_seed_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, seed: str) -> None:
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    with pytest.raises(
        MtkitError, match=f"^SACREBLEU_SEED='{seed}' is not a non-negative integer; set one, or the word none"
    ):
        resample([of(corpus(3, 0))], 2)


def test_resampled_values_are_the_scores_of_the_resamples() -> None:
    systems = [of(corpus(30, noise)) for noise in (0.2, 0.4)]
    scores = resample(systems, 40)
    for number in range(len(ALL_METRICS)):
        values = resampled_values([system[number] for system in systems], 40)
        assert values.tolist() == [[score.score for score in system[number]] for system in scores]


def test_memory_does_not_grow_with_resamples_times_segments() -> None:
    segments, draws = 200_000, 64
    (pattern,) = of(corpus(100, 0.3), ["BLEU"])
    kinds = np.zeros(segments, dtype=np.intp)
    one = Statistics("BLEU", pattern.metrics, np.tile(pattern.rows, (segments // 100, 1)), kinds)
    other = Statistics("BLEU", pattern.metrics, one.rows[::-1], kinds)
    tracemalloc.start()
    resample([[one], [other]], draws)
    shuffle([one], [[other]], draws)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < draws * segments * 8  # the indices alone, as sacrebleu holds them


def test_progress_reaches_the_end() -> None:
    told: dict[str, list[int]] = {}

    def progress(items: Iterable[Any], what: str, total: int | None) -> Iterable[Any]:
        seen = 0
        for seen, item in enumerate(items, start=1):  # noqa: B007
            yield item
        assert total is not None
        told[what] = [seen, total]

    found = gather(named_metrics(["BLEU"]), corpus(600, 0.2), [corpus(600, 0)], progress=progress)
    resample([found], 600, progress=progress)
    shuffle(found, [found], 600, progress=progress)
    assert told == {"BLEU": [3, 3], "bootstrap": [3, 3], "randomisation": [3, 3]}


def test_the_seed_is_sacrebleus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert statistics.seed() == 12345
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    assert statistics.seed() == 7
    monkeypatch.setenv("SACREBLEU_SEED", "None")
    assert statistics.seed() is None
